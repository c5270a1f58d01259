"""What lr="auto" refuses or warns of, because of what a wrapper or a scheduler does."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cubegrad.backends.native import tensors
from cubegrad.cautions import warn

Group = dict[str, Any]

LOW = 0.05  # a factor below is not the peak of a schedule that was made for lr="auto"
ABSURD = 1e-6  # below, even the first step of a warm-up is unlikely
LOW_STEPS = 100


def params_changed(last: list[Tensor], params: list[Tensor], state: Mapping[Tensor, Any]) -> bool:
    """Whether the groups have other parameters than in the last step.

    Refuses parameters that are put into the groups in turns, for a step each: one that was stepped
    before comes back while another one leaves its state behind. Each such step would advance the
    estimate, with the sums of some parameters only.
    """
    if tensors.same_objects(last, params):
        return False
    was, now = set(map(id, last)), set(map(id, params))
    back, gone = (
        sum("step" in state.get(param, {}) for param in side if id(param) not in others)
        for side, others in ((params, was), (last, now))
    )
    if back and gone:
        raise RuntimeError(
            f"{back} parameters that had left the param groups are back, and {gone} of the "
            "last step have left: lr='auto' makes one estimate of all parameters, which must be "
            "in the groups at every step(). With DeepSpeed ZeRO-3, use one param group and a "
            "sub_group_size of at least the number of parameters, or ZeRO-2; else give lr a number"
        )
    return True


class FactorWatch:
    """Warns once if the groups' lr, which is a factor on the estimate, stays too small to train.

    It ends when a factor reaches LOW. So the low end of a schedule, or of one that is resumed, is
    not its business; nor is a warm-up while it rises, unless OneCycleLR says where it will end.
    """

    def __init__(self) -> None:
        self.largest = -1.0
        self.steps = 0  # in which the largest factor has not risen

    def is_over(self, groups: Sequence[Group]) -> bool:
        """Whether the groups of this step end it."""
        rates = (group["lr"] for group in groups)
        factors = [rate.detach() if isinstance(rate, Tensor) else rate for rate in rates]
        on_device = any(isinstance(f, Tensor) and not f.is_cpu for f in factors)
        largest = LOW if on_device else max(map(float, factors))  # reading one would wait for it
        is_first, rises = self.largest < 0, largest > self.largest
        self.largest = max(self.largest, largest)
        self.steps = 0 if rises else self.steps + 1
        peak = _peak_of_one_cycle(groups) if is_first else None
        highest = self.largest if peak is None else max(peak, self.largest)
        absurd = is_first and 0 < largest < ABSURD
        if highest >= LOW:
            return True
        if peak is not None or absurd or self.steps >= LOW_STEPS:
            warn(
                f"with lr='auto' a group's lr is a factor on the estimate, and it is {largest:.3g} "
                f"now and at most {highest:.3g}, so the weights hardly move: use 1, and "
                "schedules with a peak of 1, such as OneCycleLR(max_lr=1.0). A learning-rate "
                "finder has nothing to find here, and what it sets must be set back to 1"
            )
            return True
        return False


def _peak_of_one_cycle(groups: Sequence[Group]) -> float | None:
    """The largest lr that OneCycleLR will set, which it notes in every group."""
    peaks = [group.get("max_lr") for group in groups]
    known = [float(peak) for peak in peaks if isinstance(peak, int | float)]
    return max(known) if len(known) == len(peaks) else None
