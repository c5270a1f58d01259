"""LoRA (arXiv 2106.09685): linear layers are frozen, and the product of two thin matrices added."""

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import linear


class LowRank(nn.Module):
    """`layer(x) + up down x`. `up` starts at 0, so the first outputs are those of the layer."""

    def __init__(self, layer: nn.Linear, rank: int, generator: Generator) -> None:
        super().__init__()
        self.layer = layer
        bound = layer.in_features**-0.5  # torch's for a linear layer
        down = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        self.down = nn.Parameter(down.to(layer.weight))
        self.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out + linear(linear(inputs, self.down), self.up)


def add_low_rank(model: nn.Module, rank: int, generator: Generator) -> None:
    """Freeze the model and add trained factors to its linear layers, except tied ones."""
    model.requires_grad_(False)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in embeddings
    ]
    for name, module in layers:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LowRank(module, rank, generator))
