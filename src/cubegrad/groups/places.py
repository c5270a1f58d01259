"""The places of parameters in a model: their names, their kinds, how deep they lie."""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

KINDS = ("norms", "biases", "embeddings", "scales")
NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
WEIGHTED = (nn.Linear, _ConvNd, nn.Bilinear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
# Modules that are not of torch are known by the names of their class and their parameters.
EMBEDDING_CLASS = re.compile(r"embeddings?$", re.I)
EMBEDDING_NAME = re.compile(r"(^|_)emb(ed(ding)?s?)?($|_)|(^|_)tokens?$", re.I)
BLOCK = re.compile(r"\d+|\w*(layer|block|stage)s?_?\d+")
HEAD = re.compile(r"(\w+_)?heads?|classifier|score|fc|qa_outputs")
# A class, also as a base class, and the attribute in which it keeps the model that it wraps.
WRAPPERS = {
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "BaseTuner": "model",  # of peft, and the two below
    "BaseTunerLayer": "base_layer",
    "PeftModel": "base_model",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}


class Use(NamedTuple):
    """One place of a parameter in the model; a tied parameter has several."""

    path: tuple[str, ...]  # the parts of its name, without those that wrappers add
    param: Tensor
    owner: nn.Module
    role: str  # what the owner calls the parameter

    @property
    def name(self) -> str:
        return ".".join(self.path)


def uses_of(model: nn.Module) -> list[Use]:
    """Every parameter by every name, in the order of named_parameters()."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups() got a {type(model).__name__} and needs a model (torch.nn.Module), for "
            "the names and layers of its parameters; pass model, not model.parameters()"
        )
    uses = list(_walk(model, (), ()))
    if not uses:
        raise ValueError(
            f"the {type(model).__name__} has 0 parameters and must have some; pass one with weights"
        )
    for use in uses:
        if is_lazy(use.param):
            raise ValueError(
                f"{use.name} has no shape before the model's first batch; run a batch through the "
                "model first"
            )
        if type(use.param).__name__ == "FlatParameter":
            raise ValueError(
                f"{use.name} is a flat parameter of FSDP1, which has norms, biases and weights in "
                "one tensor; use fully_shard (FSDP2), or FSDP1 with use_orig_params=True"
            )
    return uses


def _walk(module: nn.Module, path: tuple[str, ...], above: tuple[nn.Module, ...]) -> Iterator[Use]:
    for key, param in module._parameters.items():
        if param is None:
            continue
        owner, role = module, key
        if isinstance(module, nn.ParameterList | nn.ParameterDict) and path:
            owner, role = above[-1], path[-1]
        elif isinstance(module, ParametrizationList) and len(path) > 1:
            # weight_norm has two tensors; here they get the names of its first version.
            part = {"original0": "_g", "original1": "_v"}.get(key, "")
            owner, role = above[-2], path[-1] + part
        yield Use((*path, key), param, owner, role)
    bases = {base.__name__ for base in type(module).__mro__}
    hidden = {WRAPPERS[name] for name in bases & WRAPPERS.keys()}
    for key, child in module._modules.items():
        if child is not None:
            inner = path if key in hidden else (*path, key)
            yield from _walk(child, inner, (*above, module))


def kind_of(use: Use) -> str:
    """One of KINDS, or "weights"."""
    words, param = use.role.lower().split("_"), use.param
    is_vector = sum(size > 1 for size in param.shape) <= 1
    class_name = type(use.owner).__name__
    if isinstance(use.owner, NORMS) or ("norm" in class_name.lower() and is_vector):
        return "norms"
    if "bias" in words or "biases" in words:
        return "biases"
    if isinstance(use.owner, EMBEDDINGS):
        return "embeddings"
    # By the layer and not by the shape: FSDP1 shows weights as vectors.
    if isinstance(use.owner, WEIGHTED) and "weight" in words:
        return "scales" if words[-1] == "g" and is_vector else "weights"
    if EMBEDDING_CLASS.search(class_name) or EMBEDDING_NAME.search(use.role):
        return "embeddings"
    return "scales" if param.ndim <= 1 else "weights"


def depths_of(uses: list[Use]) -> dict[str, int]:
    """By name: embeddings 0, the blocks 1, 2, … in their order, the head the most.

    What is in no block has the depth of the block before it; after the last one, of the head.
    """
    blocks = {block: 0 for use in uses if (block := _block(use))}
    if not blocks:
        raise ValueError(
            "layer_decay needs numbered blocks, such as layers.0, layers.1, and there are none "
            f"among {', '.join(use.name for use in uses[:3])}, …; give learning rates by patterns"
        )
    blocks = {block: place for place, block in enumerate(blocks, 1)}
    head = len(blocks) + 1
    depths, last = {}, 0
    for use in uses:
        block = _block(use)
        if block:
            last = blocks[block]
            depths[use.name] = last
        elif any(HEAD.fullmatch(part) for part in use.path):
            depths[use.name] = head
        elif _is_of_embedding(use):
            depths[use.name] = 0
        else:
            depths[use.name] = head if last == len(blocks) else last
    return depths


def _is_of_embedding(use: Use) -> bool:
    """Also its norm, such as BART's layernorm_embedding, which is registered after the blocks."""
    kind = kind_of(use)
    named = any(EMBEDDING_NAME.search(part) for part in use.path)
    return kind == "embeddings" or (named and kind != "weights")


def _block(use: Use) -> str:
    """The outermost numbered module that the parameter is in, unless it is a head or embedding."""
    for place, part in enumerate(use.path[:-1], 1):
        if HEAD.fullmatch(part):
            return ""
        if BLOCK.fullmatch(part):
            alone = place == len(use.path) - 1 and isinstance(use.owner, EMBEDDINGS)
            return "" if alone else ".".join(use.path[:place])
    return ""


def matches(pattern: str, use: Use) -> bool:
    ends = range(1, len(use.path) + 1)
    return any(fnmatchcase(".".join(use.path[:end]), pattern) for end in ends)
