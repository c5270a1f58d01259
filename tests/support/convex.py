"""Convex, non-smooth, stochastic problems, with minimisers from scipy.

f(x) = (1/n) ∑_i loss(a_i·x, b_i) + μ ‖x‖₁, and ξ is a row i drawn uniformly.
"""

import lzma
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from scipy import optimize
from torch import Tensor
from torch.nn.functional import one_hot as one_hot_rows
from torch.nn.functional import softplus

from cubegrad import family

A9A = Path(__file__).parents[3] / "shared" / "data" / "a9a.xz"
MANY = int(os.environ.get("CUBEGRAD_EXAMPLES", "1"))  # `make test-all` looks ten times as long


def examples(count: int) -> settings:
    slow = [HealthCheck.too_slow]
    return settings(
        max_examples=count * MANY, deadline=None, derandomize=True, suppress_health_check=slow
    )


LOSSES = {
    "l1": lambda score, b: (score - b).abs(),
    "hinge": lambda score, b: (1 - b * score).clamp(min=0),
    "logistic": lambda score, b: softplus(-b * score),
}
SLOPES = {  # a subgradient in the score, at most 1 in absolute value
    "l1": lambda score, b: torch.sign(score - b),
    "hinge": lambda score, b: -b * (b * score < 1),
    "logistic": lambda score, b: -b * torch.sigmoid(-b * score),
}


@dataclass(frozen=True)
class Problem:
    kind: str
    rows: Tensor  # a
    targets: Tensor  # b; ±1 for hinge and logistic
    penalty: float = 0.0  # μ

    @property
    def dimension(self) -> int:
        return self.rows.shape[1]

    def grad_bounds(self) -> Tensor:
        """G_d: |slope| ≤ 1, so no coordinate of a subgradient is larger, at any x."""
        return self.rows.abs().amax(0) + self.penalty

    def value(self, x: Tensor) -> Tensor:
        """f of each run's x."""
        losses = LOSSES[self.kind](x @ self.rows.T, self.targets)
        return losses.mean(-1) + self.penalty * x.abs().sum(-1)

    def sampled(self, x: Tensor, index: Tensor) -> Tensor:
        """f(x, ξ), run by run."""
        score = (x * self.rows[index]).sum(-1)
        return LOSSES[self.kind](score, self.targets[index]) + self.penalty * x.abs().sum(-1)

    def gradient(self, x: Tensor, index: Tensor) -> Tensor:
        """∇f(x, ξ), run by run."""
        a, b = self.rows[index], self.targets[index]
        slope = SLOPES[self.kind]((x * a).sum(-1), b)
        return slope[..., None] * a + self.penalty * torch.sign(x)

    def draw(self, runs: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self.rows), (runs,), generator=generator)


def one_hot() -> Problem:
    """Made like a9a: a row has one 1 per attribute, common and rare values alike, 44 columns."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for size in (2, 3, 5, 7, 11, 16):
        often = 0.7 ** torch.arange(size, dtype=torch.float64)
        values = torch.multinomial(often, 500, replacement=True, generator=generator)
        columns.append(one_hot_rows(values, size).double())
    rows = torch.cat(columns, 1)
    scores = rows @ torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    noise = torch.randn(500, generator=generator, dtype=torch.float64)
    return Problem("logistic", rows, torch.sign(scores - 1.5 + noise), penalty=1e-3)


def a9a() -> Problem:
    """Logistic regression with a little ℓ1: without it some coordinates of x_* are infinite."""
    with lzma.open(A9A, "rt") as file:
        lines = [line.split() for line in file]
    rows = np.zeros((len(lines), 123))
    for row, (_, *entries) in zip(rows, lines, strict=True):
        for entry in entries:
            place, value = entry.split(":")
            row[int(place) - 1] = float(value)
    targets = np.array([float(label) for label, *_ in lines])
    assert rows.shape == (32_561, 123)
    return Problem("logistic", torch.from_numpy(rows), torch.from_numpy(targets), penalty=1e-3)


without_a9a = pytest.mark.skipif(not A9A.exists(), reason="a9a is not beside the repository")
each_sparse = pytest.mark.parametrize(
    "make", [one_hot, pytest.param(a9a, marks=without_a9a)], ids=["one_hot", "a9a"]
)


def minimise(problem: Problem) -> tuple[Tensor, float]:
    """x_* and a lower bound on f(x_*), both from scipy."""
    if problem.kind == "logistic":
        return _minimise_logistic(problem)
    return _minimise_linear(problem)


def _minimise_linear(problem: Problem) -> tuple[Tensor, float]:
    """As a linear program in x = p - q and the losses t, for HiGHS."""
    a, b = problem.rows.numpy(), problem.targets.numpy()
    n, d = a.shape
    if problem.kind == "l1":  # t ≥ ±(a·x - b)
        table, limits = np.vstack([a, -a]), np.concatenate([b, -b])
        table = np.hstack([table, -table, np.vstack([-np.eye(n), -np.eye(n)])])
    else:  # t ≥ 1 - b a·x
        signed = b[:, None] * a
        table, limits = np.hstack([-signed, signed, -np.eye(n)]), -np.ones(n)
    cost = np.concatenate([np.full(2 * d, problem.penalty), np.full(n, 1 / n)])
    found = optimize.linprog(cost, A_ub=table, b_ub=limits, bounds=(0, None), method="highs")
    assert found.status == 0, found.message
    return torch.from_numpy(found.x[:d] - found.x[d : 2 * d]), found.fun


def _minimise_logistic(problem: Problem) -> tuple[Tensor, float]:
    """As a smooth problem in x = p - q ≥ 0, with the value of a feasible point of its dual.

    The dual of (1/n) ∑ log(1+e^{-m_i}) + μ‖x‖₁ is the mean entropy of θ ∈ [0,1]^n, subject to
    ‖(1/n) ∑ θ_i b_i a_i‖_∞ ≤ μ.
    """
    signed = (problem.targets[:, None] * problem.rows).numpy()
    n, d = signed.shape

    def both(pq: np.ndarray) -> tuple[float, np.ndarray]:
        margin = signed @ (pq[:d] - pq[d:])
        slope = -(1 / (1 + np.exp(margin))) @ signed / n
        value = np.logaddexp(0, -margin).mean() + problem.penalty * pq.sum()
        return value, np.concatenate([slope, -slope]) + problem.penalty

    settings = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 50}
    found = optimize.minimize(
        both, np.zeros(2 * d), jac=True, bounds=[(0, None)] * 2 * d, options=settings
    )
    x = found.x[:d] - found.x[d:]
    theta = 1 / (1 + np.exp(signed @ x))
    theta *= min(1.0, problem.penalty / np.abs(theta @ signed / n).max())
    entropy = -(theta * np.log(theta) + (1 - theta) * np.log1p(-theta)).mean()
    return torch.from_numpy(x), float(entropy)


@dataclass(frozen=True)
class Step:
    """x_k, and what the step from it has seen."""

    k: int
    x: Tensor
    index: Tensor  # ξ_k
    grad: Tensor  # g_k
    grad_sum: Tensor  # s_{k+1}
    grad_sq_sum: Tensor  # ν_{k+1}


def run(
    problem: Problem, x0: Tensor, lr: float, grad_bound: float | Tensor, steps: int, runs: int
) -> Iterator[Step]:
    """The theoretical MADGRAD, many runs at once: it works by coordinate, so a run is a row."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(x0.repeat(runs, 1))
    if isinstance(grad_bound, Tensor):
        grad_bound = grad_bound.expand_as(param)
    optimizer = family.TheoreticalMADGRAD([param], lr=lr, grad_bound=grad_bound)
    for k in range(steps):
        x = param.detach().clone()
        index = problem.draw(runs, generator)
        param.grad = problem.gradient(x, index)
        optimizer.step()
        state = optimizer.state[param]
        sums = [state[name].clone() for name in ("grad_sum", "grad_sq_sum")]
        yield Step(k, x, index, param.grad, *sums)
