"""Convex, non-smooth, stochastic problems, their minimisers from scipy, and runs of MADGRAD.

f(x) = (1/n) ∑_i loss(a_i·x, b_i) + μ ‖x‖₁, and ξ is a row i drawn uniformly.
"""

import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import randn
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor
from torch.nn import functional

from cubegrad import family

A9A = Path(__file__).parents[3] / "shared" / "data" / "a9a.xz"

LOSSES = {
    "l1": lambda score, b: (score - b).abs(),
    "hinge": lambda score, b: (1 - b * score).clamp(min=0),
    "logistic": lambda score, b: functional.softplus(-b * score),
}
SLOPES = {  # a subgradient with respect to the score, at most 1 in absolute value
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

    @property
    def origin(self) -> Tensor:
        return torch.zeros(self.dimension, dtype=torch.float64)

    def grad_bounds(self) -> Tensor:
        """G_d, which bounds coordinate d of every subgradient, since |slope| ≤ 1."""
        return self.rows.abs().amax(0) + self.penalty

    def value(self, x: Tensor) -> Tensor:
        """f(x) of each run."""
        losses = LOSSES[self.kind](x @ self.rows.T, self.targets)
        return losses.mean(-1) + self.penalty * x.abs().sum(-1)

    def sampled(self, x: Tensor, index: Tensor) -> Tensor:
        """f(x, ξ) of each run."""
        score = (x * self.rows[index]).sum(-1)
        return LOSSES[self.kind](score, self.targets[index]) + self.penalty * x.abs().sum(-1)

    def gradient(self, x: Tensor, index: Tensor) -> Tensor:
        """∇f(x, ξ) of each run."""
        a, b = self.rows[index], self.targets[index]
        slope = SLOPES[self.kind]((x * a).sum(-1), b)
        return slope[..., None] * a + self.penalty * torch.sign(x)

    def draw(self, runs: int, generator: torch.Generator) -> Tensor:
        """ξ of each run."""
        return torch.randint(len(self.rows), (runs,), generator=generator)


def one_hot() -> Problem:
    """Synthetic data like a9a: 44 columns, one 1 per attribute in each row, some values rare."""
    generator = torch.Generator().manual_seed(0)
    columns = []
    for size in (2, 3, 5, 7, 11, 16):
        frequency = 0.7 ** torch.arange(size, dtype=torch.float64)
        values = torch.multinomial(frequency, 500, replacement=True, generator=generator)
        columns.append(functional.one_hot(values, size).double())
    rows = torch.cat(columns, 1)
    scores = rows @ torch.randn(rows.shape[1], generator=generator, dtype=torch.float64)
    noise = torch.randn(500, generator=generator, dtype=torch.float64)
    return Problem("logistic", rows, torch.sign(scores - 1.5 + noise), penalty=1e-3)


def a9a() -> Problem:
    """Logistic regression with a small ℓ1 penalty: without it x_* has infinite coordinates."""
    with lzma.open(A9A, "rt") as file:
        lines = [line.split() for line in file]
    rows = np.zeros((len(lines), 123))
    for row, (_, *entries) in zip(rows, lines, strict=True):
        for entry in entries:
            column, value = entry.split(":")
            row[int(column) - 1] = float(value)
    targets = np.array([float(label) for label, *_ in lines])
    assert rows.shape == (32_561, 123)
    return Problem("logistic", torch.from_numpy(rows), torch.from_numpy(targets), penalty=1e-3)


needs_a9a = pytest.mark.skipif(not A9A.exists(), reason="a9a.xz was not found")
each_sparse = pytest.mark.parametrize(
    "make", [one_hot, pytest.param(a9a, marks=needs_a9a)], ids=["one_hot", "a9a"]
)


@st.composite
def problems(
    draw: st.DrawFn,
    rows: tuple[int, int],
    scales: Sequence[float],
    penalties: Sequence[float],
) -> Problem:
    """Random problems with so many rows, fewest and most, in up to four dimensions."""
    kind = draw(st.sampled_from(sorted(LOSSES)))
    seed, n, d = draw(st.integers(0, 10**6)), draw(st.integers(*rows)), draw(st.integers(1, 4))
    a = randn((n, d), torch.float64, seed) * draw(st.sampled_from(scales))
    b = randn((n,), torch.float64, seed + 1)
    penalty = draw(st.sampled_from(penalties))
    return Problem(kind, a, b if kind == "l1" else b.sign(), penalty)


def minimise(problem: Problem) -> tuple[Tensor, float]:
    """x_* and a lower bound on f(x_*)."""
    if problem.kind == "logistic":
        return _minimise_logistic(problem)
    return _minimise_linear(problem)


def _minimise_linear(problem: Problem) -> tuple[Tensor, float]:
    """Solve a linear program in p, q ≥ 0, where x = p - q, and in the losses t."""
    a, b = problem.rows.numpy(), problem.targets.numpy()
    n, d = a.shape
    if problem.kind == "l1":  # t ≥ ±(a·x - b)
        table, limits = np.vstack([a, -a]), np.concatenate([b, -b])
        table = np.hstack([table, -table, np.vstack([-np.eye(n), -np.eye(n)])])
    else:  # t ≥ 1 - b a·x
        signed = b[:, None] * a
        table, limits = np.hstack([-signed, signed, -np.eye(n)]), -np.ones(n)
    cost = np.concatenate([np.full(2 * d, problem.penalty), np.full(n, 1 / n)])
    solution = optimize.linprog(cost, A_ub=table, b_ub=limits, bounds=(0, None), method="highs")
    assert solution.status == 0, solution.message
    return torch.from_numpy(solution.x[:d] - solution.x[d : 2 * d]), solution.fun


def _minimise_logistic(problem: Problem) -> tuple[Tensor, float]:
    """Minimise a smooth function of p, q ≥ 0, where x = p - q; a dual point gives the lower bound.

    The dual of (1/n) ∑ log(1+e^{-m_i}) + μ‖x‖₁ is the mean entropy of θ ∈ [0,1]^n, subject to
    ‖(1/n) ∑ θ_i b_i a_i‖_∞ ≤ μ.
    """
    signed = (problem.targets[:, None] * problem.rows).numpy()
    n, d = signed.shape

    def value_and_gradient(pq: np.ndarray) -> tuple[float, np.ndarray]:
        margin = signed @ (pq[:d] - pq[d:])
        slope = -(1 / (1 + np.exp(margin))) @ signed / n
        value = np.logaddexp(0, -margin).mean() + problem.penalty * pq.sum()
        return value, np.concatenate([slope, -slope]) + problem.penalty

    settings = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-10, "maxcor": 50}
    bounds = [(0, None)] * 2 * d
    best, pq = np.inf, np.zeros(2 * d)
    while True:  # one in 400 random problems with rows of scale 10 needs a restart
        solution = optimize.minimize(
            value_and_gradient, pq, jac=True, bounds=bounds, options=settings
        )
        if solution.fun > best * (1 - 1e-9):
            break
        best, pq = solution.fun, solution.x
    x = pq[:d] - pq[d:]
    theta = 1 / (1 + np.exp(signed @ x))
    theta *= min(1.0, problem.penalty / np.abs(theta @ signed / n).max())
    entropy = -(theta * np.log(theta) + (1 - theta) * np.log1p(-theta)).mean()
    return torch.from_numpy(x), float(entropy)


@dataclass(frozen=True)
class Step:
    """Step k, from x_k to x_{k+1}."""

    k: int
    x: Tensor
    index: Tensor  # ξ_k
    grad: Tensor  # g_k
    grad_sum: Tensor  # s_{k+1}
    grad_sq_sum: Tensor  # ν_{k+1}


def run(
    problem: Problem, x0: Tensor, lr: float, grad_bound: float | Tensor, steps: int, runs: int
) -> Iterator[Step]:
    """The steps of TheoreticalMADGRAD in many runs at once, each a row of one parameter."""
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
