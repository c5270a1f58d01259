"""How the buffers are stored: at least float32, shaped and strided as their parameter."""

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

# What each method keeps for a parameter beside `step`, in the order its rule takes them.
LAYOUTS = {
    "madgrad": ("grad_sum", "grad_sq_sum", "initial_param"),
    "mirror_madgrad": ("grad_sq_sum", "z"),
}
# initial_param is not kept while momentum is 0, unless the parameter is too coarse to recover it.
OPTIONAL = frozenset({"initial_param"})
DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)


def check(name: str, param: Tensor) -> None:
    """Refuse a parameter that cannot be stepped."""
    if param.dtype not in DTYPES:
        raise TypeError(
            f"{name} has dtype {param.dtype}; parameters must be float16, bfloat16, float32, "
            "float64 or complex: leave it out or convert it"
        )
    if isinstance(param, UninitializedParameter | UninitializedBuffer):
        return  # a lazy module gives it a shape before it has a gradient
    if param.is_conj() or param.is_neg():
        raise TypeError(
            f"{name} is a conjugated or negated view, which cannot be written to; parameters must "
            "hold their own values: use param.resolve_conj().resolve_neg()"
        )


def check_grad(name: str, param: Tensor) -> None:
    """Refuse a gradient that torch lets someone assign, and no step can use."""
    grad = param.grad
    if grad is None:
        return
    if grad.dtype not in DTYPES or grad.is_complex() != param.is_complex():
        raise TypeError(
            f"the gradient of {name} has dtype {grad.dtype} and its parameter {param.dtype}; "
            "gradients must be float16, bfloat16, float32 or float64, complex for complex "
            "parameters: convert it"
        )
    if grad.shape != param.shape:
        raise ValueError(
            f"the gradient of {name} has shape {tuple(grad.shape)} and its parameter "
            f"{tuple(param.shape)}; they must be equal: compute the gradient after changing "
            "param.data"
        )


def dtype_of(param: Tensor) -> torch.dtype:
    """float32 for half precision: ν of a float16 gradient of 300 would overflow float16."""
    return torch.promote_types(param.dtype, torch.float32)


def keeps_initial_param(momentum: float | Tensor, param: Tensor) -> bool:
    """Whether x_0 has to be stored.

    Without momentum x is z and gives x_0 back, but not if x is rounded more coarsely than the sums
    are: then moves smaller than x's last place would be lost for good. A momentum that is a tensor
    may change without our seeing it.
    """
    return isinstance(momentum, Tensor) or momentum != 0 or dtype_of(param) != param.dtype


def layout(method: str, momentum: float | Tensor, param: Tensor) -> tuple[str, ...]:
    """The buffers that the method keeps for this parameter at this momentum."""
    if keeps_initial_param(momentum, param):
        return LAYOUTS[method]
    return tuple(name for name in LAYOUTS[method] if name not in OPTIONAL)


def zeros(param: Tensor) -> Tensor:
    return torch.zeros_like(param, dtype=dtype_of(param), memory_format=torch.preserve_format)


def copy(param: Tensor) -> Tensor:
    """A real copy, never an alias; autograd sees it when gradients are enabled."""
    return param.to(dtype_of(param), copy=True, memory_format=torch.preserve_format)


def counter(param: Tensor, on_device: bool) -> Tensor:
    """k = 0, as torch.optim keeps `step`: on the host unless a graph must be able to hold it."""
    return torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")


def real(tensor: Tensor) -> Tensor:
    """The real numbers that the rule works on; a complex number is two coordinates.

    A view, but of a gradient whose sign is only noted on it, which becomes a copy.
    """
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def lie_alike(first: Tensor, *others: Tensor) -> bool:
    """Whether one offset in memory means one coordinate in all of them, with no gaps between."""
    if any(tensor.is_neg() or tensor.is_conj() for tensor in (first, *others)):
        return False
    if first.is_contiguous():
        return all(other.is_contiguous() for other in others)
    strides = [_strides(tensor) for tensor in (first, *others)]
    expected = 1
    for stride, size in sorted(strides[0]):
        if stride != expected:
            return False
        expected *= size
    return all(other == strides[0] for other in strides[1:])


def lies_in_storage(tensor: Tensor) -> bool:
    """Whether the storage holds every element; one that was resized may not."""
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return tensor.numel() == 0
    offset = tensor.storage_offset() * tensor.element_size()
    if tensor.is_contiguous():
        needed = tensor.nbytes
    else:
        last = sum(stride * (size - 1) for stride, size in _strides(tensor))
        needed = (last + 1) * tensor.element_size()
    return offset + needed <= tensor.untyped_storage().nbytes()


def _strides(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions along which there is anywhere to go."""
    pairs = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in pairs if size != 1]
