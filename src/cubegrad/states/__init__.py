"""How the buffers are stored: at least float32, shaped and strided as their parameter."""

import torch
from torch import Tensor

# What each method keeps for a parameter beside `step`, in the order its rule takes them.
LAYOUTS = {
    "madgrad": ("grad_sum", "grad_sq_sum", "initial_param"),
    "mirror_madgrad": ("grad_sq_sum", "z"),
}
# initial_param is not kept while momentum is 0.
OPTIONAL = frozenset({"initial_param"})


def dtype_of(param: Tensor) -> torch.dtype:
    """float32 for half precision: ν of a float16 gradient of 300 would overflow float16."""
    return torch.promote_types(param.dtype, torch.float32)


def zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=dtype_of(param), memory_format=torch.preserve_format)


def copy(param: Tensor) -> Tensor:
    """A real copy, never an alias; autograd sees it when gradients are enabled."""
    return param.to(dtype_of(param), copy=True, memory_format=torch.preserve_format)


def counter(param: Tensor, on_device: bool) -> Tensor:
    """k = 0, as torch.optim keeps `step`: on the host unless a graph must be able to hold it."""
    return torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")


def real(tensor: Tensor) -> Tensor:
    """The real view that the rule works on; a complex number is two coordinates."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def lie_alike(first: Tensor, *others: Tensor) -> bool:
    """Whether one offset in memory means one coordinate in all of them, with no gaps between."""
    if first.is_contiguous():
        return all(other.is_contiguous() for other in others)
    strides = [_strides(tensor) for tensor in (first, *others)]
    expected = 1
    for stride, size in sorted(strides[0]):
        if stride != expected:
            return False
        expected *= size
    return all(other == strides[0] for other in strides[1:])


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions along which there is anywhere to go."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in pairs if size != 1]
