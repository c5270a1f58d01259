"""Check that nothing but the gradients' addresses changed since a step was prepared.

These checks are most of what a fused step costs the host, so they are made in C. Where the
extension was not built, or torch is not as it expects, the functions named `plain_` make them.
"""

import ctypes
import importlib
from array import array
from bisect import bisect_right
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubegrad.backends.spans import lies_in_storage, span

# Looked up by name in torch's library. The first nine are its stable C interface, the others C++
# functions of (const Tensor&) or, for `grad`, of a tensor's implementation; `_probe` tests them.
FUNCTIONS = (
    *(f"aoti_torch_get_{what}" for what in ("data_ptr", "dtype", "layout", "dim")),
    *(f"aoti_torch_get_{what}" for what in ("sizes", "strides", "storage_size")),
    "aoti_torch_get_storage_offset",
    "aoti_torch_dtype_element_size",
    "_ZNK3c1010TensorImpl4gradEv",  # c10::TensorImpl::grad
    "_ZN2at6native6is_negERKNS_6TensorE",  # at::native::is_neg
    "_ZN2at4impl19tensor_has_dispatchERKNS_6TensorE",  # at::impl::tensor_has_dispatch
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",  # torch::autograd::impl::bump_version
)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _location(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.untyped_storage().nbytes()


def plain_signature(params: list[Tensor], state: list[Tensor]) -> Any:
    """Everything that a prepared step relies on, or None if it cannot be repeated."""
    if any(tensor.is_neg() for tensor in (*params, *state)):
        return None
    signature = [(*_location(tensor), *_form(tensor)) for tensor in state]
    for param in params:
        grad = param.grad
        if type(grad) is not Tensor or grad.layout != torch.strided or grad.is_neg():
            return None
        if grad.shape != param.shape or not lies_in_storage(grad):
            return None
        start, end = span(grad) if grad.numel() else (0, 0)
        form = param.dtype, param.stride(), grad.dtype, grad.stride()
        signature.append((*_location(param), param.shape, *form, end - start))
    return signature


def plain_addresses(params: list[Tensor], state: list[Tensor], signature: Any) -> bytes | None:
    """The gradients' addresses if everything else is as in the signature, else None."""
    count = len(state)
    if signature is None or len(signature) != count + len(params):
        return None
    if plain_signature([], state) != signature[:count]:
        return None
    addresses = array("q")
    # This runs for each parameter before each step, so it calls none of our functions.
    for param, known in zip(params, signature[count:], strict=True):
        start, size, shape, dtype, strides, grad_dtype, grad_strides, length = known
        grad = param.grad
        if type(grad) is not Tensor or grad.layout is not torch.strided or grad.is_neg():
            return None
        if grad.shape != shape or grad.dtype != grad_dtype or grad.stride() != grad_strides:
            return None
        if param.shape != shape or param.dtype != dtype or param.stride() != strides:
            return None
        if param.data_ptr() != start or param.untyped_storage().nbytes() != size or param.is_neg():
            return None
        address = grad.data_ptr()
        if length:
            before = grad.storage_offset() * grad_dtype.itemsize
            if not address or before + length > grad.untyped_storage().nbytes():
                return None
        addresses.append(address)
    return addresses.tobytes()


def joined(signatures: list[Any]) -> Any:
    """One signature of several lists of state tensors."""
    if signatures and isinstance(signatures[0], bytes):
        return b"".join(signatures)
    return [tensor for signature in signatures for tensor in signature]


def plain_bump_versions(params: list[Tensor]) -> None:
    """Tell autograd that these tensors were written to."""
    torch.autograd.graph.increment_version(params)


def plain_same_objects(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def plain_any_within(spans: bytes, lengths: bytes, addresses: bytes) -> bool:
    """Whether any tensor at these addresses, of these lengths, overlaps one of the spans."""
    bounds = array("q", spans)
    starts, ends = bounds[::2], bounds[1::2]
    for start, length in zip(array("q", addresses), array("q", lengths), strict=True):
        nearest = bisect_right(ends, start)  # the first span that ends after its start
        if nearest < len(starts) and length and starts[nearest] < start + length:
            return True
    return False


def _offset() -> int:
    """The offset of the number in `_cdata` in a tensor's object; 0 if it is not found."""
    probes: list[Any] = [torch.zeros(1), torch.nn.Parameter(torch.ones(2)), torch.ones(2, 2).t()]
    for place in range(object.__basicsize__, Tensor.__basicsize__, ctypes.sizeof(ctypes.c_void_p)):
        values = [ctypes.c_void_p.from_address(id(probe) + place).value for probe in probes]
        if values == [probe._cdata for probe in probes]:
            return place
    return 0


def _library() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (folder / name).exists():
            return ctypes.CDLL(str(folder / name))
    raise OSError(f"no libtorch_cpu in {folder}")


def _bind(native: Any) -> None:
    """Give the extension torch's functions by address."""
    library = _library()
    addresses = [ctypes.cast(library[name], ctypes.c_void_p).value for name in FUNCTIONS]
    parallel = getattr(library, "torch_parallel_for", None)  # since torch 2.10
    addresses.append(parallel and ctypes.cast(parallel, ctypes.c_void_p).value)
    layout = library.aoti_torch_layout_strided()
    native.bind(Tensor, _offset(), layout, tuple(addresses), torch.ones(1))
    _probe(native)


def _probe(native: Any) -> None:
    """Refuse a torch whose C++ functions do not do what their names say."""
    param, state = torch.nn.Parameter(torch.ones(2)), [torch.ones(2)]
    signatures = [native.signature([param], state)]
    for grad in (torch.ones(2), torch._neg_view(torch.ones(2))):
        param.grad = grad
        signatures.append(native.signature([param], state))
    version = param._version
    native.bump_versions([param])
    repeatable = [signature is not None for signature in signatures]
    if (repeatable, param._version) != ([False, True, False], version + 1):
        raise OSError(f"functions of torch {torch.__version__} do not do what their names say")


native: Any = None
signature, addresses = plain_signature, plain_addresses
same_objects, any_within = plain_same_objects, plain_any_within
bump_versions = plain_bump_versions
missing = ""
try:
    native = importlib.import_module("cubegrad.backends.native._native")
    same_objects, any_within = native.same_objects, native.any_within
    _bind(native)
    signature, addresses = native.signature, native.addresses
    bump_versions = native.bump_versions
except (ImportError, AttributeError, OSError) as error:  # not built, or torch differs
    missing = str(error)
