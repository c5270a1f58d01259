"""A look at the tensors of a step: whether all but the gradients' addresses is as it was.

It is most of what a fused step asks of the host, so there is a quick way in C and a plain one.
"""

import ctypes
import importlib
from array import array
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = tuple(f"aoti_torch_get_{what}" for what in ("data_ptr", "dtype", "layout", "dim"))
FUNCTIONS += ("aoti_torch_get_sizes", "aoti_torch_get_strides")


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def plain_signature(params: list[Tensor]) -> Any:
    """All that a prepared step relies on, or None if it cannot be relied on."""
    signature = []
    for param in params:
        grad = param.grad
        if type(grad) is not Tensor or grad.layout != torch.strided:
            return None
        signature.append((param.data_ptr(), _facts(param), _facts(grad)))
    return signature


def plain_addresses(params: list[Tensor], signature: Any) -> bytes | None:
    """Where the gradients lie, if everything else is as the signature has it."""
    if plain_signature(params) != signature:
        return None
    return array("q", (param.grad.data_ptr() for param in params)).tobytes()  # type: ignore[union-attr]


def plain_same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def _offset() -> int:
    """Where a tensor's object keeps the number in `_cdata`; 0 if that cannot be told."""
    probes: list[Any] = [torch.zeros(1), torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2).t()]
    for place in range(object.__basicsize__, Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p)):
        found = [ctypes.c_void_p.from_address(id(probe) + place).value for probe in probes]
        if found == [probe._cdata for probe in probes]:
            return place
    return 0


def _library() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise OSError(f"no libtorch_cpu in {folder}")


def _bind(native: Any) -> None:
    """Give the extension those of torch's C functions that promise to stay as they are."""
    library = _library()
    addresses = [ctypes.cast(library[name], ctypes.c_void_p).value for name in FUNCTIONS]
    parallel = getattr(library, "torch_parallel_for", None)  # since torch 2.10
    addresses.append(parallel and ctypes.cast(parallel, ctypes.c_void_p).value)
    native.bind(Tensor, _offset(), library.aoti_torch_layout_strided(), tuple(addresses))


native: Any = None
signature, addresses, same = plain_signature, plain_addresses, plain_same
missing = ""
try:
    native = importlib.import_module("cubegrad.backends._native")
    same = native.same
    _bind(native)
    signature, addresses = native.signature, native.addresses
except (ImportError, AttributeError, OSError) as error:  # not built here, or an older torch
    missing = str(error)
