"""Algorithm 1, its mirror form and MADGRADW in float64 numpy: the reference for every backend.

`size` has the sum of the absolute values of all that was added up for each result, to first order.
Rounding errors are relative to it, and not to the result, which cancellation may make small.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass
class Settings:
    lr: float = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0
    eps: float = 1e-6
    decoupled_weight_decay: bool = False
    decoupled_lr: bool = False
    maximize: bool = False
    first_lr: float = 1e-2

    def coupled_decay(self) -> float:
        decoupled = self.decoupled_weight_decay or self.decoupled_lr
        return 0.0 if decoupled else self.weight_decay

    def gradient(self, x: Array, g: Array) -> tuple[Array, Array]:
        """The effective gradient and its size."""
        decay = self.coupled_decay()
        return (-g if self.maximize else g) + decay * x, np.abs(g) + decay * np.abs(x)

    def shrink(self) -> float:
        if self.decoupled_lr:
            return 1 - self.weight_decay * self.lr / self.first_lr
        return max(0.0, 1 - self.lr * self.weight_decay) if self.decoupled_weight_decay else 1.0


def quotient(numerator: Array, denominator: Array) -> Array:
    """0 where the denominator is 0: a coordinate that never had a gradient does not move."""
    out = np.zeros(np.shape(numerator))
    return np.divide(numerator, denominator, out=out, where=denominator != 0)


@dataclass
class Madgrad:
    x: Array
    k: int = 0
    x0: Array = field(init=False)
    s: Array = field(init=False)
    nu: Array = field(init=False)
    size: dict[str, Array] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.x = np.array(self.x, dtype=np.float64)
        self.x0 = self.x.copy()
        self.s = np.zeros_like(self.x)
        self.nu = np.zeros_like(self.x)

    def displacement(self, eps: float) -> Array:
        return quotient(self.s, np.cbrt(self.nu) + eps)

    def step(self, g: Array, o: Settings) -> None:
        g, g_size = o.gradient(self.x, np.asarray(g, dtype=np.float64))
        old_size = np.abs(self.x) + np.abs(self.displacement(o.eps))
        shrink = o.shrink()
        self.x, self.x0, self.s = shrink * self.x, shrink * self.x0, shrink * self.s
        lam = o.lr * np.sqrt(self.k + 1)
        s_size = np.abs(self.s) + lam * g_size
        nu_size = self.nu + 2 * lam * np.abs(g) * g_size
        self.s = self.s + lam * g
        self.nu = self.nu + lam * g * g
        z = self.x0 - self.displacement(o.eps)
        c = 1 - o.momentum
        self.x = (1 - c) * self.x + c * z
        self.k += 1
        moved = quotient(s_size, np.cbrt(self.nu) + o.eps)
        moved += np.abs(self.displacement(o.eps)) * (1 + quotient(nu_size, 3 * self.nu))
        self.size = {
            "x": np.abs(self.x) + old_size + np.abs(self.x0) + moved,
            "grad_sum": s_size,
            "grad_sq_sum": nu_size,
            "initial_param": np.abs(self.x0),
        }

    def restart(self, x: Array, state: dict[str, Array], o: Settings) -> None:
        """Continue from rounded numbers that an optimizer stored; x_0 is computed if missing."""
        self.x = x
        self.s, self.nu = state["grad_sum"], state["grad_sq_sum"]
        self.x0 = state.get("initial_param", x + self.displacement(o.eps))

    def state(self) -> dict[str, Array]:
        return {"grad_sum": self.s, "grad_sq_sum": self.nu, "initial_param": self.x0}

    def beside(self, stored: Array) -> dict[str, Array]:
        """The state beside this x, which may have been rounded to half precision."""
        del stored
        return self.state()


@dataclass
class Estimate:
    """An estimated learning rate, for several parameters that are stepped together."""

    runs: list[Madgrad]
    distance: float = 0.0
    scale: float = 0.0
    agreement: float = 0.0
    weight_sum: float = 0.0
    counted: float = 1.0  # n_k: 1 + Σ w_i

    @property
    def uncounted(self) -> float:
        return 1 - self.counted / (self.runs[0].k + 1)

    @property
    def lr(self) -> float:
        rate = self.distance**1.5 / np.sqrt(self.scale**1.5)
        return float(rate * np.sqrt(self.counted / (self.runs[0].k + 1)))

    def numbers(self) -> tuple[float, ...]:
        """What a group keeps of it."""
        root_sum = sum(np.cbrt(run.nu).sum() for run in self.runs)
        own = (self.distance, self.agreement, self.lr, self.weight_sum)
        return *own, self.runs[0].k, self.uncounted, root_sum

    def mean(self, arrays: list[Array]) -> float:
        return float(sum(a.sum() for a in arrays) / sum(run.x.size for run in self.runs))

    def step(self, grads: list[Array], o: Settings, factor: float = 1.0) -> None:
        effective = [o.gradient(r.x, g)[0] for r, g in zip(self.runs, grads, strict=True)]
        if not self.distance:
            moved = [r.x[g != 0] for r, g in zip(self.runs, effective, strict=True)]
            self.distance = max(1e-6, 0.02 * np.sqrt(np.mean(np.concatenate(moved) ** 2)))
            self.scale = self.mean([np.abs(g) ** (2 / 3) for g in effective])
        lr = self.lr
        weight = factor * lr * np.sqrt(self.runs[0].k + 1)
        self.agreement *= replace(o, lr=factor * lr, first_lr=lr).shrink()
        for run, g in zip(self.runs, grads, strict=True):
            loss = -g if o.maximize else g
            away = run.x0 - run.x
            decay = np.minimum(o.coupled_decay() * run.x * away, 0)
            self.agreement += weight * float((loss * away + decay).sum())
        old_roots = self.mean([np.cbrt(run.nu) for run in self.runs])
        for run, g in zip(self.runs, grads, strict=True):
            run.step(g, replace(o, lr=factor * lr, first_lr=lr))
        roots = [np.cbrt(run.nu) for run in self.runs]
        moves = (quotient(r.s, root + o.eps) for r, root in zip(self.runs, roots, strict=True))
        product = sum((r.s * u).sum() for r, u in zip(self.runs, moves, strict=True))
        norm = np.sqrt(product * sum(root.sum() for root in roots))
        if norm > 0:
            self.distance = max(self.distance, self.agreement / norm)
        new_roots, share = self.mean(roots), 1.0
        if weight > 0 and self.weight_sum > 0:
            # g²/H², from the growth of ∛ν beside that of ∛Σλ
            grown = np.cbrt(1 + weight / self.weight_sum) - 1
            square = (new_roots / old_roots - 1) / grown
            share = float(np.clip(np.sqrt(self.counted) * square, 0, 1))
        self.weight_sum += share * weight
        self.counted += share
        if self.weight_sum > 0:
            self.scale = new_roots / self.weight_sum ** (1 / 3)


@dataclass
class EstimateFreeOfScale:
    """An estimated learning rate of MADGRADW, for several parameters that are stepped together."""

    runs: "list[Madgradw]"
    distance: float = 0.0
    agreement: float = 0.0

    @property
    def lr(self) -> float:
        return self.distance

    def numbers(self) -> tuple[float, ...]:
        root_sum = sum(np.sqrt(run.nu).sum() for run in self.runs)
        return self.distance, self.agreement, self.lr, 0.0, self.runs[0].k, 0.0, root_sum

    def step(self, grads: list[Array], o: Settings, factor: float = 1.0) -> None:
        effective = [o.gradient(r.x, g)[0] for r, g in zip(self.runs, grads, strict=True)]
        if not self.distance:
            moved = [r.x[g != 0] for r, g in zip(self.runs, effective, strict=True)]
            self.distance = max(1e-6, 0.02 * np.sqrt(np.mean(np.concatenate(moved) ** 2)))
        o = replace(o, lr=factor * self.distance, first_lr=self.distance)
        self.agreement *= o.shrink()
        newest = 0.0
        for run, g in zip(self.runs, grads, strict=True):
            loss = -g if o.maximize else g
            away = run.x0 - run.x
            decay = np.minimum(o.coupled_decay() * run.x * away, 0)
            newest += o.lr * float((loss * away + decay).sum())
            run.step(g, o)
        roots = [np.sqrt(run.nu) for run in self.runs]
        total = sum(root.sum() for root in roots)
        lengths = (
            (root + o.eps) * np.abs(run.x0 - run.z)
            for run, root in zip(self.runs, roots, strict=True)
        )
        length = sum(own.sum() for own in lengths) / total  # the mean of |x_0 - z|
        self.agreement += newest / total
        if length > 0:
            self.distance = max(self.distance, min(self.agreement / length, length))


@dataclass
class MirrorMadgrad:
    x: Array
    k: int = 0
    z: Array = field(init=False)
    nu: Array = field(init=False)
    size: dict[str, Array] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.x = np.array(self.x, dtype=np.float64)
        self.z = self.x.copy()
        self.nu = np.zeros_like(self.x)

    def step(self, g: Array, o: Settings) -> None:
        g, g_size = o.gradient(self.x, np.asarray(g, dtype=np.float64))
        old_size = np.abs(self.x) + np.abs(self.z)
        self.x, self.z = o.shrink() * self.x, o.shrink() * self.z
        self.nu = np.sqrt(self.k / (self.k + 1)) * self.nu
        nu_size = self.nu + 2 * np.abs(g) * g_size
        self.nu = self.nu + g * g
        rate, denominator = o.lr * np.cbrt(self.k + 1), np.cbrt(self.nu) + o.eps
        self.z = self.z - rate * quotient(g, denominator)
        c = 1 - o.momentum
        self.x = (1 - c) * self.x + c * self.z
        self.k += 1
        moved = rate * quotient(g_size, denominator) * (1 + quotient(nu_size, 3 * self.nu))
        self.size = {
            "x": np.abs(self.x) + old_size + moved,
            "z": old_size + moved,
            "grad_sq_sum": nu_size,
        }

    def restart(self, x: Array, state: dict[str, Array], _: Settings) -> None:
        self.x = x
        self.nu, self.z = state["grad_sq_sum"], state.get("z", x)

    def state(self) -> dict[str, Array]:
        return {"grad_sq_sum": self.nu, "z": self.z}

    def beside(self, stored: Array) -> dict[str, Array]:
        del stored
        return self.state()


@dataclass
class Madgradw(MirrorMadgrad):
    """x_0 is for an estimated learning rate."""

    x0: Array = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.x0 = self.x.copy()

    def step(self, g: Array, o: Settings) -> None:
        g, g_size = o.gradient(self.x, np.asarray(g, dtype=np.float64))
        old_size = np.abs(self.x) + np.abs(self.z)
        self.x, self.z, self.x0 = (o.shrink() * each for each in (self.x, self.z, self.x0))
        a = 1.5 / (self.k + 1.5)
        nu_size = (1 - a) * self.nu + 2 * a * np.abs(g) * g_size
        self.nu = (1 - a) * self.nu + a * g * g
        denominator = np.sqrt(self.nu) + o.eps
        self.z = self.z - o.lr * quotient(g, denominator)
        down = (np.sign(self.z - self.x) * np.sign(g) < 0) | (o.momentum == 0)
        self.x = np.where(down, self.x + (1 - o.momentum) * (self.z - self.x), self.x)
        self.finish(o.lr * quotient(g_size, denominator), nu_size, old_size)

    def finish(self, moved: Array, nu_size: Array, old_size: Array) -> None:
        """Count the step; `moved` is the size of its move, but for the error of the root."""
        self.k += 1
        size = np.abs(self.x) + old_size + moved * (1 + quotient(nu_size, 2 * self.nu))
        self.size = {"x": size, "dual_offset": size, "grad_sq_sum": nu_size}
        self.size["initial_param"] = np.abs(self.x0)

    def restart(self, x: Array, state: dict[str, Array], _: Settings) -> None:
        self.x = x
        self.nu, self.z = state["grad_sq_sum"], x + state.get("dual_offset", 0.0)
        self.x0 = state.get("initial_param", self.x0)

    def state(self) -> dict[str, Array]:
        offset = self.z - self.x
        return {"grad_sq_sum": self.nu, "dual_offset": offset, "initial_param": self.x0}

    def beside(self, stored: Array) -> dict[str, Array]:
        return self.state() | {"dual_offset": self.z - stored}


@dataclass
class ScheduleFree(Madgradw):
    """`x` is y, where gradients are taken; `mean` the mean of all z."""

    mean: Array = field(init=False)
    largest: float = 0.0
    weight_sum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mean = self.x.copy()

    def step(self, g: Array, o: Settings) -> None:
        g, g_size = o.gradient(self.x, np.asarray(g, dtype=np.float64))
        old_size = np.abs(self.x) + np.abs(self.z) + np.abs(self.mean)
        decay, self.x0 = (1 - o.shrink()) * self.x, o.shrink() * self.x0
        a = 1.5 / (self.k + 1.5)
        nu_size = (1 - a) * self.nu + 2 * a * np.abs(g) * g_size
        self.nu = (1 - a) * self.nu + a * g * g
        denominator = np.sqrt(self.nu) + o.eps
        self.z = self.z - decay - o.lr * quotient(g, denominator)
        self.largest = max(self.largest, o.lr)
        weight = self.largest**2
        self.weight_sum += weight
        if weight:
            self.mean = self.mean + weight / self.weight_sum * (self.z - self.mean)
        self.x = (1 - o.momentum) * self.z + o.momentum * self.mean
        self.finish(o.lr * quotient(g_size, denominator), nu_size, old_size)

    def restart(self, x: Array, state: dict[str, Array], o: Settings) -> None:
        super().restart(x, state, o)
        self.mean = self.x + (1 - 1 / o.momentum) * (self.z - self.x)
