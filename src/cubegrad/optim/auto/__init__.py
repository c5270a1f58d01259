"""lr="auto": what the rest of the optimizer asks of it.

One estimate serves all groups; a group's own `lr` is a factor on it. Everything stays on the
device, so that only the first step waits for it. The maths is in distance.py.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from cubegrad import distance, sharding
from cubegrad.backends.batch import capturing
from cubegrad.distance import FIELDS
from cubegrad.functions import TorchFunctions
from cubegrad.optim.auto import checks, first
from cubegrad.optim.auto.estimate import Estimate, coordinates, empty, hold, lr_of, weighed
from cubegrad.optim.auto.shared import Shared
from cubegrad.options import Hyper
from cubegrad.rule import Rule
from cubegrad.state import conversion, layout

__all__ = ["Auto", "Shared", "empty", "hold", "lr_of"]

Group = dict[str, Any]
State = Mapping[Tensor, Any]  # an optimizer's


class Auto:
    """The estimate of one optimizer. Its numbers are in the groups, where checkpoints find them."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.shared: Shared | None = None  # the processes that make one estimate
        self._forget()

    def _forget(self) -> None:
        self.estimate: Estimate | None = None
        self.waiting = first.Waiting()
        self.params: list[Tensor] = []  # of the last step
        self.watch: checks.FactorWatch | None = None  # until the factors are known to be sane

    def reset(self) -> None:
        """Take the numbers from the groups again: a checkpoint was loaded."""
        self.estimate = None

    def restart(self, groups: Sequence[Group]) -> None:
        """Begin anew at the next step."""
        for group in groups:
            hold(group, empty())
        self._forget()

    def has_begun(self, groups: Sequence[Group]) -> bool:
        """Whether there is an estimate, in the groups at least."""
        return self.estimate is not None or any(first.has_begun(g["estimate"]) for g in groups)

    def begin(
        self,
        groups: Sequence[Group],
        state: State,
        hyper: Callable[..., Hyper],
        same_params: bool = False,
    ) -> list[Hyper] | None:
        """The numbers of every group at the estimated rate, with sums for the backends to add to.

        None while no gradient gives the estimate a scale: then no weight may move. `hyper` makes a
        group's numbers from it and the rate. `same_params` says that the groups are known to have
        the parameters of the last step.
        """
        traced = torch.compiler.is_compiling()  # then `against_tracing` has asked
        changed = not (traced or same_params) and self._params_changed(groups, state)
        if not (traced or self._is_held(self.estimate, groups)):
            self.estimate = self._begin(groups, state, hyper)
        elif changed and self.estimate is not None:
            self.estimate.follow(groups)
        if self.estimate is None:
            return None
        if self.watch is not None and not traced and self.watch.is_over(groups):
            self.watch = None
        lr = self.estimate.begin(traced)
        pairs = zip(groups, self.estimate.parts, strict=True)
        return [hyper(group, lr)._replace(sums=part) for group, part in pairs]

    def _params_changed(self, groups: Sequence[Group], state: State) -> bool:
        params = [param for group in groups for param in group["params"]]
        changed = checks.params_changed(self.params, params, state)
        self.params = params
        return changed

    @staticmethod
    def _is_held(estimate: Estimate | None, groups: Sequence[Group]) -> TypeGuard[Estimate]:
        """Whether the groups hold the estimate; not after one was added, or a checkpoint loaded."""
        if estimate is None or len(groups) != len(estimate.rows):
            return False
        pairs = zip(groups, estimate.rows, strict=True)
        return all(group["estimate"] is row for group, row in pairs)

    @torch.no_grad()
    def _begin(
        self, groups: Sequence[Group], state: State, hyper: Callable[..., Hyper]
    ) -> Estimate | None:
        """The estimate that the groups hold, or one that begins with the gradients they have now.

        None if those are all 0 or not finite. To know that, it waits for the device.
        """
        device = first.device_of(groups)
        if device is None and self.shared is not None:
            device = self.shared.default_device()
        if device is not None and capturing():
            raise RuntimeError(
                "step() is being captured in a CUDA graph before the first one of lr='auto'; run "
                "one step before the capture"
            )
        rows = None if device is None else first.held_rows(groups, device)
        if rows is None and device is not None:
            hypers = [hyper(group, 0.0) for group in groups]
            rows = first.rows(self.rule, groups, state, hypers, device, self.shared, self.waiting)
            self.watch = self.watch if rows is None else checks.FactorWatch()
        self.waiting.count(rows is None)
        return None if rows is None else Estimate(self.rule, groups, rows.to(device))

    @torch.no_grad()
    def end(
        self,
        groups: Sequence[Group],
        state: State,
        hypers: Sequence[Hyper],
        repeated: Container[int] = (),
        views: Sequence[Group] | None = None,
    ) -> None:
        """Take in the sums of a step that all groups have made.

        In the groups that were repeated the same parameters have gradients as in the step before,
        unless `views` are the groups without the parameters that were stepped earlier.
        """
        estimate = self.estimate
        assert estimate is not None  # `begin` has made it
        for index, (group, h) in enumerate(zip(groups, hypers, strict=True)):
            if views is not None or index not in repeated or estimate.counts[index] < 0:
                params = (group if views is None else views[index])["params"]
                silent = [param for param in params if param.grad is None]
                estimate.look_up(index, group, silent, state)
            for param in estimate.idle[index]:
                for sums in conversion.sums(self.rule, param, state[param], h.eps):
                    self._add_idle(h, h.sums[sharding.sharded_over(param)], *sums)
        for total, over, part in estimate.sharded:
            total += sharding.sum_over_shards(part, over)
        counts: Any = estimate.stepped_counts(state) if any(estimate.idle) else estimate.counts
        live: Any = estimate.live
        if self.shared is not None:
            counts, live, found_inf = self.shared.totals(estimate, counts, hypers[0].found_inf)
            hypers = [h._replace(found_inf=found_inf) for h in hypers]
        factors = [group["lr"] for group in groups]
        if not isinstance(live, list) or False in live:
            factors, hypers = weighed(factors, hypers, live)
        if estimate.on_host:
            estimate.advance_on_host(factors, hypers, counts)
        else:
            estimate.advance_on_device(factors, hypers, counts, groups)

    def end_traced(
        self, groups: Sequence[Group], hypers: Sequence[Hyper], idle: Sequence[Sequence[Tensor]]
    ) -> None:
        """As `end`, for the compiler.

        `idle` has step count, s (or x_0 - z) and ν of idle parameters, in turns.

        It leaves the counts of the estimate to steps that are not compiled, which may be repeated.
        """
        assert self.estimate is not None
        counts: list[Any] = []
        live = []
        for group, h, tensors in zip(groups, hypers, idle, strict=True):
            with_gradient = [param for param in group["params"] if param.grad is not None]
            count: Any = sum(map(coordinates, with_gradient))
            steps, *sums = tensors[::3], tensors[1::3], tensors[2::3]
            for step, *own in zip(steps, *sums, strict=True):
                pushed, grad_sq_sum = map(layout.as_real, own)
                self._add_idle(h, h.sums[None], pushed, grad_sq_sum)
                count = count + (step > 0) * pushed.numel()
            counts.append(count)
            live.append(len(with_gradient) > 0)  # torch 2.11 cannot trace bool() of a list
        factors, hypers = weighed([group["lr"] for group in groups], hypers, live)
        self.estimate.advance_on_device(factors, hypers, counts)

    @torch.no_grad()
    def _add_idle(self, h: Hyper, sums: Tensor, pushed: Tensor, grad_sq_sum: Tensor) -> None:
        """The sums of a parameter that has no gradient this time; of real numbers."""
        new = distance.idle_sums(TorchFunctions, self.rule, h, pushed, grad_sq_sum)
        sums[1:] += torch.stack(new).to(sums.device)

    def against_tracing(self, groups: Sequence[Group]) -> str | None:
        """Why this step cannot be traced, if it cannot."""
        estimate = self.estimate
        if not self._is_held(estimate, groups):
            return (
                "the first step of lr='auto' reads its gradients on the host, so it cannot be "
                "traced: make one plain optimizer.step() before the compiled one, or leave "
                "fullgraph=True out"
            )
        if self.shared is not None or estimate.sharded:
            return (
                "a step of lr='auto' over several processes sums numbers over them and cannot be "
                "traced; leave fullgraph=True out"
            )
        return None

    @torch.no_grad()
    def shorten(self, row: Tensor, totals: Mapping[sharding.ShardedOver, Tensor]) -> None:
        """What an edit takes from ⟨s, x_0 - z⟩, it takes from the agreement of the gradients too.

        `totals` are both, before and after it. Their quotient would grow with every edit otherwise,
        and it is what the distance is found from.
        """
        parts = [sharding.sum_over_shards(t, over).to(row.device) for over, t in totals.items()]
        total = torch.stack([row.new_zeros(2), *parts]).sum(0)
        if self.shared is not None:
            total = self.shared.sum(total.to(self.shared.default_device())).to(row.device)
        before, after = total
        row[FIELDS.index("agreement")] *= torch.where(before > 0, after / before, 1.0)
