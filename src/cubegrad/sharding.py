"""DTensor in, local shard out: a step is elementwise, so each process steps what it holds."""

import gc
import importlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Group = dict[str, Any]
API = "torch.distributed.tensor"  # imported by the user, if at all: it takes a second
# The mesh and its dimensions that a tensor is sharded over; None if every process has all of it.
ShardedOver = tuple[Any, tuple[int, ...]] | None


def is_sharded(tensor: Tensor) -> bool:
    api = sys.modules.get(API)  # without which there is no DTensor
    return api is not None and isinstance(tensor, api.DTensor)


def local(tensor: Any) -> Tensor:
    """The shard that this process holds; a plain tensor is returned unchanged.

    The very object: `to_local` makes a new view each time, and a repeated step has to know whether
    the shard is still the same.
    """
    shard: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    if type(shard) is not Tensor and hasattr(shard, "wait"):  # a collective is still under way
        shard = shard.wait()
    return shard


def locals_of(tensors: list[Any]) -> list[Tensor]:
    """`local` of each."""
    return tensors if API not in sys.modules else [local(tensor) for tensor in tensors]


def like(shard: Tensor, param: Any, shape: torch.Size | None = None) -> Tensor:
    """A DTensor of this shard, placed as its parameter is.

    `shape` is that of the whole, if it is not the parameter's; its memory is then contiguous.
    """
    if not is_sharded(param):
        return shard
    stride = param.stride() if shape is None else _contiguous_strides(shape)
    whole: Tensor = sys.modules[API].DTensor.from_local(
        shard,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape if shape is None else shape,
        stride=stride,
    )
    return whole


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_flattened_by_fsdp(param: Any) -> bool:
    """Whether FSDP1 has made it one dimension; fully_shard (FSDP2) does not."""
    return bool(getattr(param, "_fsdp_flattened", False))


def cut_of_first_dimension(param: Any) -> int:
    """Into how many parts it is sharded."""
    if not is_sharded(param):
        return 1
    pairs = zip(param.device_mesh.shape, param.placements, strict=True)
    return math.prod(size for size, place in pairs if getattr(place, "dim", None) == 0)


def cut_of_second_dimension(param: Any) -> int | None:
    """Into how many parts it is sharded; None if a later dimension is sharded as well."""
    if not is_sharded(param):
        return 1
    parts = 1
    for size, place in zip(param.device_mesh.shape, param.placements, strict=True):
        dim = getattr(place, "dim", 0)  # of a shard; a replica has none
        if dim > 1:
            return None
        parts *= size if dim == 1 else 1
    return parts


def first_index(param: Any) -> int:
    """The index in the whole parameter of the first coordinate that this process holds.

    Shards of rows have the indices that follow. Of shards that are cut along other dimensions as
    well, each is given a range of its own within that of its rows: their coordinates have other
    random bits than in one process, but no two have the same.
    """
    if not is_sharded(param) or sharded_over(param) is None:
        return 0
    locate = importlib.import_module(f"{API}._utils").compute_local_shape_and_global_offset
    shape, offsets = locate(param.shape, param.device_mesh, param.placements)
    strides = _contiguous_strides(param.shape)
    first = sum(
        offset * stride * math.prod(shape[:dim])
        for dim, (offset, stride) in enumerate(zip(offsets, strides, strict=True))
    )
    return int(first) * (2 if param.is_complex() else 1)


def same_placement(tensor: Any, param: Any) -> bool:
    """Whether both are sharded over the same mesh in the same way."""
    return bool(
        is_sharded(tensor)
        and tensor.placements == param.placements
        and tensor.device_mesh == param.device_mesh
    )


def gradient(grad: Any, param: Any) -> Tensor:
    """The gradient of the local shard.

    A layer that sees a part of the batch or of the sequence leaves partial sums. They are reduced
    here, as torch's optimizers do; nothing else in a step communicates, except lr="auto".
    """
    if is_sharded(grad) and not same_placement(grad, param):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def placed(value: Any, param: Any) -> Tensor:
    """The part of `value` that belongs to the parameter's shard, however `value` is placed."""
    if is_sharded(value) and not (is_sharded(param) and same_placement(value, param)):
        value = value.full_tensor()
    if is_sharded(param) and not is_sharded(value):
        mesh, placements = param.device_mesh, param.placements
        value = value.to(param.device)
        value = sys.modules[API].distribute_tensor(value, mesh, placements, src_data_rank=None)
    return local(value)


def sharded_over(param: Any) -> ShardedOver:
    if not is_sharded(param):
        return None
    cut = (dim for dim, place in enumerate(param.placements) if not place.is_replicate())
    dims = tuple(cut)
    return (param.device_mesh, dims) if dims else None


def sum_over_shards(numbers: Tensor, over: ShardedOver) -> Tensor:
    """Reduce sums over shards to sums over the whole, in place; all processes must call it."""
    if over is not None:
        mesh, dims = over
        for dim in dims:
            torch.distributed.all_reduce(numbers, group=mesh.get_group(dim))
    return numbers


class ShardGradients:
    """While it is entered, each shard has its parameter's gradient as its own `grad`.

    Then shards can be checked as plain parameters are. A gradient that is only partly summed up is
    left out.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.pairs: list[tuple[Any, Tensor]] = []
        if API in sys.modules:
            self.pairs = [(param, local(param)) for param in params if is_sharded(param)]

    def __enter__(self) -> None:
        for param, shard in self.pairs:
            grad = param.grad
            if grad is None or param._local_tensor is not shard or not same_placement(grad, param):
                continue
            grad = grad._local_tensor
            # Torch refuses others; the result of a collective under way is not a plain tensor yet.
            if type(grad) is Tensor and (grad.dtype, grad.shape) == (shard.dtype, shard.shape):
                shard.grad = grad

    def __exit__(self, *_: object) -> None:
        for _, shard in self.pairs:
            shard.grad = None


def check(name: str, param: Any) -> None:
    """Refuse a parameter whose value no process knows: its placements are terms of a sum."""
    if is_sharded(param) and any(place.is_partial() for place in param.placements):
        raise TypeError(
            f"{name} has placements {param.placements}, so the processes hold terms of a sum; "
            "parameters must be sharded or replicated: use "
            "param.redistribute(placements=[Replicate()])"
        )


def check_not_replaced(groups: list[Group]) -> bool:
    """Refuse parameters in whose place their modules now hold DTensors.

    `fully_shard` and `parallelize_module` put new parameters into the modules, and an optimizer
    built before keeps the old ones, which never get a gradient. A parameter counts as replaced if
    it has no gradient and is in no module, while a DTensor of its shape has a gradient and is in no
    optimizer. Returns whether there is a gradient; once there is, the check need not be repeated.
    """
    params = [param for group in groups for param in group["params"]]
    waiting = [param for param in params if param.grad is None and param.requires_grad]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if waiting and distributed and API in sys.modules and _replaced(waiting):
        gc.collect()  # modules that only wait for the collector do not count
        replaced = _replaced(waiting)
        if replaced:
            raise RuntimeError(
                f"{len(replaced)} of {len(params)} parameters, the first of shape "
                f"{tuple(replaced[0].shape)}, are in no module any more: fully_shard or "
                "parallelize_module has put DTensors in their place, so a step would not train "
                "them; build the optimizer after sharding the model"
            )
    return any(param.grad is not None for param in params)


def _replaced(waiting: list[Tensor]) -> list[Tensor]:
    held, optimized = _in_use()
    strays = {
        param.shape
        for param in held.values()
        if is_sharded(param) and param.grad is not None and id(param) not in optimized
    }
    return [param for param in waiting if id(param) not in held and param.shape in strays]


def _in_use() -> tuple[dict[int, Tensor], set[int]]:
    """The parameters of all modules in this process by id, and the ids of those in optimizers."""
    held: dict[int, Tensor] = {}
    optimized: set[int] = set()
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance asks proxies, whose objects may be gone
        if issubclass(kind, nn.Module):
            parameters = thing.__dict__.get("_parameters", {})
            held.update((id(param), param) for param in parameters.values() if param is not None)
        elif issubclass(kind, torch.optim.Optimizer):
            for group in thing.__dict__.get("param_groups", ()):
                optimized.update(map(id, group["params"]))
    return held, optimized
