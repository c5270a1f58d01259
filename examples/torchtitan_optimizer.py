"""MADGRAD in torchtitan: the train spec of Llama 3, with optimizers built by us.

On GPUs, where Python finds this file (in the current folder, say):

    torchrun --nproc-per-node 8 -m torchtitan.train --job.config_file train.toml \\
        --experimental.custom_import torchtitan_optimizer --model.name llama3_madgrad

torchtitan's Trainer needs a GPU. Run by itself, this file trains a tiny Llama on a CPU with the
same optimizers, schedule and loss.
"""

import dataclasses

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import JobConfig, Optimizer
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from cubegrad import MADGRAD


def build_madgrad(model_parts: list[nn.Module], config: Optimizer, *_) -> OptimizersContainer:
    """One MADGRAD per model part, from the `[optimizer]` table of the job's configuration."""
    decay = {"weight_decay": config.weight_decay, "decoupled_weight_decay": True}
    options = {"lr": config.lr, "momentum": config.beta1, **decay}
    return OptimizersContainer(model_parts, MADGRAD, options)


spec = dataclasses.replace(get_train_spec("llama3"), build_optimizers_fn=build_madgrad)
register_train_spec("llama3_madgrad", spec)


def main(steps: int = 60) -> float:
    config = JobConfig(optimizer=Optimizer(lr=1e-2, weight_decay=0.01))
    config.lr_scheduler.warmup_steps = 10
    torch.manual_seed(0)
    model = spec.model_cls(TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=64))
    with torch.no_grad():
        model.init_weights()
    optimizers = spec.build_optimizers_fn([model], config.optimizer)
    schedulers = spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, steps)
    sum_of_losses = spec.build_loss_fn(config, parallel_dims=None)
    text = torch.arange(9).repeat(4, 4)  # the model learns to count
    for _ in range(steps):
        loss = sum_of_losses(model(text[:, :-1]), text[:, 1:]) / text[:, 1:].numel()
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        schedulers.step()
    print(f"loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
