"""MADGRAD with lr="auto" in Lightning: one-cycle schedule, accumulation, logging, checkpoints.

Stop it at any time and start it again: it goes on after the last complete epoch.
"""

from pathlib import Path

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import cubegrad


class Circle(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = cubegrad.MADGRAD(self.parameters(), lr="auto")
        steps = self.trainer.estimated_stepping_batches
        scheduler = OneCycleLR(optimizer, max_lr=1.0, total_steps=steps)  # multiplies the estimate
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(self.current_epoch)  # a resumed run has the batches of an unbroken one

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log_dict({"loss": loss, "estimated_lr": cubegrad.estimated_lr(self.optimizers())})
        return loss


def main(folder: Path = Path("out/lightning"), epochs: int = 8) -> LightningModule:
    torch.manual_seed(0)
    points = torch.randn(1024, 2)
    labels = (points.norm(dim=1) > 1.2).long()  # inside or outside a circle
    loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
    model, last = Circle(), folder / "last.ckpt"
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=CSVLogger(folder),
        log_every_n_steps=16,
    )
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)
    accuracy = (model.eval().net(points).argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.1%}, estimated lr {cubegrad.estimated_lr(trainer.optimizers):.3g}")
    return model


if __name__ == "__main__":
    main()
