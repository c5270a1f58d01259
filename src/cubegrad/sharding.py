"""DTensor in, local shard out: a step is elementwise, so each process steps what it holds."""

import gc
import sys
from typing import Any

import torch
from torch import Tensor, nn

Group = dict[str, Any]
# The mesh and its dimensions along which a tensor is cut up; None if it is whole in each process.
Spread = tuple[Any, tuple[int, ...]] | None


def _api() -> Any:
    """torch.distributed.tensor where the program uses it; whoever has a DTensor has imported it."""
    return sys.modules.get("torch.distributed.tensor")


def is_sharded(tensor: Tensor) -> bool:
    api = _api()
    return api is not None and isinstance(tensor, api.DTensor)


def local(tensor: Any) -> Tensor:
    """The shard that this process holds, the very object; another tensor as it is.

    `to_local` gives a parameter's shard as a new view each time, and a prepared step has to know
    whether it is still the same.
    """
    shard: Tensor = tensor._local_tensor if is_sharded(tensor) else tensor
    if type(shard) is not Tensor and hasattr(shard, "wait"):  # a collective is still under way
        shard = shard.wait()
    return shard


def like(shard: Tensor, param: Any) -> Tensor:
    """The shard as a tensor that is spread as its parameter is."""
    if not is_sharded(param):
        return shard
    spread: Tensor = _api().DTensor.from_local(
        shard,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return spread


def lie_alike(tensor: Any, param: Any) -> bool:
    """Whether both are spread over the same mesh in the same way."""
    return bool(
        is_sharded(tensor)
        and tensor.placements == param.placements
        and tensor.device_mesh == param.device_mesh
    )


def gradient(grad: Any, param: Any) -> Tensor:
    """The gradient of the local shard.

    A layer that sees a part of the batch or of the sequence leaves partial sums. They are added up
    here, as they would be by torch's optimizers; nothing else makes a step communicate.
    """
    if is_sharded(grad) and not lie_alike(grad, param):
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local(grad)


def placed(value: Any, param: Any) -> Tensor:
    """The part of `value` that belongs to the parameter's shard, however `value` is spread."""
    if is_sharded(value) and not (is_sharded(param) and lie_alike(value, param)):
        value = value.full_tensor()
    if is_sharded(param) and not is_sharded(value):
        mesh, placements = param.device_mesh, param.placements
        value = value.to(param.device)
        value = _api().distribute_tensor(value, mesh, placements, src_data_rank=None)
    return local(value)


def bump_versions(params: list[Tensor]) -> None:
    """Tell autograd that DTensors were written to: what is stepped are their shards."""
    torch.autograd.graph.increment_version(list(filter(is_sharded, params)))


def spread(param: Any) -> Spread:
    if not is_sharded(param):
        return None
    cut = (dim for dim, place in enumerate(param.placements) if not place.is_replicate())
    dims = tuple(cut)
    return (param.device_mesh, dims) if dims else None


def added_up(numbers: Tensor, spread: Spread) -> Tensor:
    """Sums over shards made sums over the whole, in place; all processes must ask for it."""
    if spread is not None:
        mesh, dims = spread
        for dim in dims:
            torch.distributed.all_reduce(numbers, group=mesh.get_group(dim))
    return numbers


class Loan:
    """While it is entered each shard has its parameter's gradient as its own `grad`.

    So a look at shards is a look at plain parameters. What is only partly summed up is not lent.
    """

    def __init__(self, params: list[Tensor]) -> None:
        self.shards = list(map(local, params))
        pairs = zip(params, self.shards, strict=True)
        self.pairs: list[tuple[Any, Tensor]] = [(p, s) for p, s in pairs if s is not p]

    def __enter__(self) -> None:
        for param, shard in self.pairs:
            grad = param.grad
            if grad is None or param._local_tensor is not shard or not lie_alike(grad, param):
                continue
            grad = grad._local_tensor
            # Torch refuses others, and a collective still under way is no plain tensor yet.
            if type(grad) is Tensor and (grad.dtype, grad.shape) == (shard.dtype, shard.shape):
                shard.grad = grad

    def __exit__(self, *_: object) -> None:
        for _, shard in self.pairs:
            shard.grad = None


def check(name: str, param: Any) -> None:
    """Refuse a parameter of which no process knows a value."""
    if is_sharded(param) and any(place.is_partial() for place in param.placements):
        raise TypeError(
            f"{name} is spread as {param.placements}, and the processes hold terms of a sum; "
            "parameters must be sharded or replicated: use "
            "param.redistribute(placements=[Replicate()])"
        )


def refuse_replaced(groups: list[Group]) -> bool:
    """Refuse parameters in whose place their modules now hold DTensors.

    `fully_shard` and `parallelize_module` put new parameters into the modules, and an optimizer
    built before goes on holding the old ones, which never get a gradient. They are told by this:
    without a gradient, in no module, and there is a DTensor of the same shape with a gradient and
    in no optimizer. Returns whether a gradient has been seen, after which nobody need look again.
    """
    params = [param for group in groups for param in group["params"]]
    waiting = [param for param in params if param.grad is None and param.requires_grad]
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if waiting and distributed and _api() is not None and _lost(waiting):
        gc.collect()  # what looked like a module may have been about to go
        lost = _lost(waiting)
        if lost:
            raise RuntimeError(
                f"{len(lost)} of {len(params)} parameters, the first of shape "
                f"{tuple(lost[0].shape)}, are in no module any more: fully_shard or "
                "parallelize_module has put DTensors in their place, so a step would not train "
                "them; build the optimizer after sharding the model"
            )
    return any(param.grad is not None for param in params)


def _lost(waiting: list[Tensor]) -> list[Tensor]:
    held, optimized = _in_use()
    strays = {
        param.shape
        for param in held.values()
        if is_sharded(param) and param.grad is not None and id(param) not in optimized
    }
    return [param for param in waiting if id(param) not in held and param.shape in strays]


def _in_use() -> tuple[dict[int, Tensor], set[int]]:
    """The parameters of all modules that live in this process, and who is in an optimizer."""
    held: dict[int, Tensor] = {}
    optimized: set[int] = set()
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance would ask proxies, whose objects may be gone
        if issubclass(kind, nn.Module):
            parameters = thing.__dict__.get("_parameters", {})
            held.update((id(param), param) for param in parameters.values() if param is not None)
        elif issubclass(kind, torch.optim.Optimizer):
            for group in thing.__dict__.get("param_groups", ()):
                optimized.update(map(id, group["params"]))
    return held, optimized
