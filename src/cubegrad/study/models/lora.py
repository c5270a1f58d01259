"""LoRA (arXiv 2106.09685): linear layers are frozen, and the product of two thin matrices added."""

from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import linear

from cubegrad.study.problem import StudyError, optional


class LowRank(nn.Module):
    """`layer(x) + up down x`. `up` starts at 0, so the first outputs are those of the layer."""

    def __init__(self, layer: Any, rank: int, generator: Generator) -> None:
        super().__init__()
        self.layer = layer
        # A Conv1D, which GPT-2 has, is a linear layer whose weight is transposed.
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        outputs, inputs = weight.shape
        bound = inputs**-0.5  # torch's for a linear layer
        down = torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator)
        self.down = nn.Parameter(down.to(weight))
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        return out + linear(linear(inputs, self.down), self.up)

    @property
    def weight(self) -> Tensor:
        """For models that multiply by a layer's weight themselves, such as Mamba."""
        raise StudyError(
            "LoRA does not work for this model, which uses the weight of a linear layer without "
            "calling the layer; use the preset without lora"
        )


def add_low_rank(model: nn.Module, rank: int, generator: Generator) -> None:
    """Freeze the model and add trained factors to its linear layers, except tied ones."""
    model.requires_grad_(False)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    linear_layers = (nn.Linear, optional("transformers.pytorch_utils").Conv1D)
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, linear_layers) and id(module.weight) not in embeddings
    ]
    if not layers:
        raise StudyError(
            "LoRA adds its factors to linear layers, and the model has none that is not tied to "
            "the embedding; use the preset without lora"
        )
    for name, module in layers:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LowRank(module, rank, generator))
