"""Accelerate with MADGRAD: gradient accumulation, clipping and a prepared scheduler.

python examples/accelerate_loop.py    # each step takes 4 batches of 16
accelerate launch --num_processes 2 examples/accelerate_loop.py --auto    # on 2 GPUs
ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/accelerate_loop.py    # on CPUs
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from cubegrad import MADGRAD, estimated_lr


def sines(rows: int) -> TensorDataset:
    inputs = torch.rand(rows, 2) * 4 - 2
    return TensorDataset(inputs, torch.sin(2 * inputs[:, :1]) * inputs[:, 1:])


def train(auto: bool, batch: int, accumulate: int, epochs: int = 20) -> nn.Module:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    hidden = nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()
    model = nn.Sequential(*hidden, nn.Linear(64, 1))
    optimizer = MADGRAD(model.parameters(), lr="auto" if auto else 1e-2)
    loader = DataLoader(sines(512), batch, shuffle=True)
    steps = epochs * len(loader) // accumulate  # of the optimizer; counted before prepare()
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            total += loss.item() / len(loader)
        rate = scheduler.get_last_lr()[0] * (estimated_lr(optimizer) if auto else 1)
        accelerator.print(f"epoch {epoch}: loss {total:.4f}, then lr {rate:.3e}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--auto", action="store_true", help='lr="auto"')
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4, help="batches for each step")
    train(**vars(parser.parse_args()))
