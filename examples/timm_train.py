"""MADGRAD in timm: its optimizer factory, its schedule, and Lookahead.

Once it is registered, `--opt cubegrad` works in timm's train.py, too.
"""

import timm
import torch
from timm.optim import Lookahead, OptimInfo, create_optimizer_v2
from timm.optim._optim_factory import default_registry
from timm.scheduler import create_scheduler_v2
from torch.nn.functional import cross_entropy

from cubegrad import MADGRAD

default_registry.register(OptimInfo("cubegrad", MADGRAD, "cubegrad's MADGRAD", has_momentum=True))


class MadgradLookahead(Lookahead):
    """`--opt lookahead_cubegrad` would leave this out, and MADGRAD undo what Lookahead does."""

    def update_slow(self, group: dict) -> None:
        with self._base_optimizer.edit_weights():
            super().update_slow(group)


def stripes() -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images with horizontal (0) or vertical (1) stripes."""
    labels = torch.randint(2, (32,))
    rows = (torch.rand(32, 1, 32, 1) > 0.5).float().expand(-1, 1, 32, 32)
    images = torch.where(labels.bool().view(-1, 1, 1, 1), rows.mT, rows)
    return images + torch.randn_like(images), labels


def main(epochs: int = 3, updates_per_epoch: int = 16) -> float:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=2, in_chans=1)
    optimizer = create_optimizer_v2(model, "cubegrad", lr=2.5e-3, weight_decay=1e-4)
    optimizer = MadgradLookahead(optimizer)
    scheduler, epochs = create_scheduler_v2(
        optimizer,
        num_epochs=epochs,
        warmup_epochs=1,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    for update in range(epochs * updates_per_epoch):
        images, labels = stripes()
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step_update(update + 1)
    print(f"loss {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
