"""MADGRAD with lr="auto" in Lightning: one-cycle schedule, accumulation, logging, checkpoints.

Stop it at any time and start it again: it goes on after the last complete epoch.
"""

from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks, loggers
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import cubegrad


class Circle(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
        points = torch.randn(1024, 2)
        self.data = TensorDataset(points, (points.norm(dim=1) > 1.2).long())

    def train_dataloader(self) -> DataLoader:
        seed = torch.Generator().manual_seed(self.current_epoch)  # so resuming changes no batch
        order = torch.randperm(len(self.data), generator=seed).tolist()
        return DataLoader(self.data, batch_size=32, sampler=order)

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = cubegrad.MADGRAD(self.parameters(), lr="auto")
        steps = self.trainer.estimated_stepping_batches
        scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)  # multiplies the estimate
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log_dict({"loss": loss, "estimated_lr": cubegrad.estimated_lr(self.optimizers())})
        return loss


def main(folder: Path = Path("out/lightning"), epochs: int = 8) -> LightningModule:
    torch.manual_seed(0)
    model, last = Circle(), folder / "last.ckpt"
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[callbacks.ModelCheckpoint(folder, save_last=True)],
        logger=loggers.CSVLogger(folder),
        log_every_n_steps=16,
        reload_dataloaders_every_n_epochs=1,
    )
    trainer.fit(model, ckpt_path=last if last.exists() else None)
    print({name: round(value.item(), 4) for name, value in trainer.callback_metrics.items()})
    return model


if __name__ == "__main__":
    main()
