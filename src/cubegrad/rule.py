"""The methods of the family, as records, and the two functions that step any of them.

The eager and foreach backends and the JAX twin run these functions. The Triton and C kernels
restate them, with the record's fields as constants, and one grid of tests holds every backend to
the same float64 oracle.

`xp` brings the functions that array libraries spell differently: `xp.cbrt(v)` is ∛v for v ≥ 0,
`xp.quotient(n, d)` is n/d, or 0 where 1/d is not finite, `xp.where(c, a, b)` is a where c, else b.
`h` is one group's numbers for this step (`options.Hyper`). Any array type with operators will do: a
torch tensor, a list of tensors, a JAX array, a numpy array.

The order of operations is part of a rule. `λ g` is formed before it is multiplied by the second
`g`, so a step size of 0 gives 0 and not 0·∞ when g² overflows. Every move is a subtraction of a
difference, so a step that should move nothing changes no bit, not even the sign of a zero.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Array = Any
Scalar = Any
Hyper = Any
Namespace = Any
State = Mapping[str, Array]  # a rule's buffers, by their names
Store = Callable[[Array, Array, Array], tuple[Array, Any]]

WEIGHTED = "weighted"  # ν_{k+1} = ν_k + λ_k g_k²: a sum, which never falls
FADING = "fading"  # ν_{k+1} = √(k/(k+1)) ν_k + g_k²


class Rule(NamedTuple):
    """A method. Those without a pull move z by the newest gradient alone: mirror descent."""

    name: str
    root: int  # of ν in the denominator: 3 is ∛ν + ε
    growth_root: int  # λ_k = γ_k times this root of k+1
    squares: str  # how g² enters ν: WEIGHTED or FADING
    pulls: bool  # dual averaging: z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε)

    @property
    def has_estimate(self) -> bool:
        """Whether distance.py can estimate the learning rate, from the sums of MADGRAD."""
        return self.pulls and self.root == 3

    @property
    def never_falls(self) -> bool:
        """Whether ν only grows, so that a gradient of 0 leaves it unchanged."""
        return self.squares == WEIGHTED


MADGRAD = Rule("madgrad", root=3, growth_root=2, squares=WEIGHTED, pulls=True)
# With ν̃_k = ν_k √k this ν is the paper's sum for γ = 1: ν̃_{k+1} = ν̃_k + √(k+1) g². So
# ∛ν̃ = (k+1)^{1/6} ∛ν, and the paper's move √(k+1) g / ∛ν̃ is (k+1)^{1/3} g / ∛ν. A constant γ
# enters the paper's move as γ/∛γ = γ^{2/3}; here that whole factor is the learning rate.
MIRROR_MADGRAD = Rule("mirror_madgrad", root=3, growth_root=3, squares=FADING, pulls=False)
RULES = (MADGRAD, MIRROR_MADGRAD)


def step_weight(rule: Rule, lr: Scalar, step: Scalar) -> Scalar:
    return lr * (step + 1) ** (1 / rule.growth_root)  # λ_k


def loss_gradient(h: Hyper, grad: Array) -> Array:
    return -grad if h.maximize else grad


def has_coupled_decay(h: Hyper) -> bool:
    """True for an array, whatever its value: to ask for it would wait for the device."""
    return not isinstance(h.weight_decay, float | int) or h.weight_decay != 0


def effective_gradient(h: Hyper, param: Array, grad: Array) -> Array:
    """The gradient of what is minimised: -f under maximize, f + wd/2 ‖x‖² under coupled decay."""
    grad = loss_gradient(h, grad)
    return grad + param * h.weight_decay if has_coupled_decay(h) else grad


def root(xp: Namespace, rule: Rule, grad_sq_sum: Array) -> Array:
    """∛ν."""
    del rule  # of which there is no other root yet
    return xp.cbrt(grad_sq_sum)


def power(rule: Rule, root_of: Array) -> Array:
    """ν, whose root this is."""
    del rule
    return root_of * root_of * root_of


def displacement(xp: Namespace, rule: Rule, eps: float, state: State) -> Array:
    """x_0 - z_k. A coordinate whose denominator is 0 has not left x_0."""
    denominator = root(xp, rule, state["grad_sq_sum"]) + eps  # ∛ν_k + ε
    return xp.quotient(state["grad_sum"], denominator)  # s_k / (∛ν_k + ε)


def recover_initial_param(
    xp: Namespace, rule: Rule, eps: float, param: Array, state: State
) -> Array:
    """x_0 from the state, for a run without momentum, where x_k is z_k."""
    return param + displacement(xp, rule, eps, state)  # x_0 = z_k + s_k / (∛ν_k + ε)


def average(param: Array, dual_point: Array, momentum: Scalar) -> Array:
    return param - (param - dual_point) * (1 - momentum)  # x_{k+1} = (1-c) x_k + c z_{k+1}


def shrunk(h: Hyper, array: Array) -> Array:
    """Decoupled decay. h.shrink is 1 - γ_k wd, or None when there is no such decay."""
    return array if h.shrink is None else array * h.shrink


def add_square(rule: Rule, step: Scalar, grad_sq_sum: Array, weighted: Array, grad: Array) -> Array:
    """ν_{k+1}; `weighted` is λ_k g_k."""
    if rule.squares == WEIGHTED:
        return grad_sq_sum + weighted * grad
    return grad_sq_sum * (step / (step + 1)) ** 0.5 + grad * grad


def step(
    xp: Namespace, rule: Rule, h: Hyper, step: Scalar, param: Array, grad: Array, state: State
) -> tuple[Array, dict[str, Array]]:
    """x and the state after one step; `step` is k, counted from 0.

    With a pull but without `initial_param` c is 1: then x is z, and z_{k+1} is x_k moved by the
    change of the displacement, so x_0 need not be kept.

    Decoupled decay multiplies x_k, x_0 and s_k by h.shrink, and so z_k. If it shrank x alone, the
    averaging would pull x back to z. If it shrank z by moving x_0 alone, s_k would bring the
    decayed distance back whenever ν grows.
    """
    grad = effective_gradient(h, param, grad)
    param = shrunk(h, param)
    weighted = grad * step_weight(rule, h.lr, step)  # λ_k g_k
    new = {"grad_sq_sum": add_square(rule, step, state["grad_sq_sum"], weighted, grad)}
    del grad  # a list of tensors is large
    if not rule.pulls:
        move = xp.quotient(weighted, root(xp, rule, new["grad_sq_sum"]) + h.eps)
        # Taking away a negative zero would turn -0 into 0.
        new["z"] = shrunk(h, state["z"]) - (move + 0.0)  # z_{k+1} = z_k - λ_k g_k / (∛ν_{k+1} + ε)
        return average(param, new["z"], h.momentum), new
    new["grad_sum"] = shrunk(h, state["grad_sum"]) + weighted  # s_{k+1} = s_k + λ_k g_k
    del weighted
    if "initial_param" not in state:
        old = shrunk(h, displacement(xp, rule, h.eps, state))
        move = displacement(xp, rule, h.eps, new) - old
        return param - move, new  # x_{k+1} = z_{k+1}
    new["initial_param"] = shrunk(h, state["initial_param"])
    dual_point = new["initial_param"] - displacement(xp, rule, h.eps, new)  # z_{k+1}
    return average(param, dual_point, h.momentum), new


def unrounded(param: Array, ahead: Array, new_param: Array) -> tuple[Array, Array]:
    """x_{k+1} and z_{k+1} - x_{k+1}; `param` is x_k, `ahead` x_k - z_{k+1}."""
    return new_param, (param - new_param) - ahead


def step_from_root(
    xp: Namespace,
    rule: Rule,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    dual_offset: Array | None,
    old_root: Array,
    initial_param: Array | None = None,
    store: Store = unrounded,
) -> tuple[Array, Any, Array, Array | None]:
    """`step` from m = z - x, r = ∛ν and, with a pull, x_0: a form whose state can be rounded.

    With d = x_0 - z the sums are s = d (r + ε) and ν = r³, so z_{k+1} is the same as in `step`.
    There a rounding error of s or ν stays in a sum for good. Here one of r changes a coordinate's
    step size a little and moves nothing, and one of m can be put into x, where it fades.

    Without `dual_offset` c is 1, and x is z. A coordinate with r = 0 has had no gradient yet, so it
    has not left x_0, whatever rounding made of x_0. `store` makes of x and m what is stored.
    Returns these and r after the step, and with a pull x_0 - z_{k+1}.
    """
    grad = effective_gradient(h, param, grad)
    param = shrunk(h, param)
    dual_offset = None if dual_offset is None else shrunk(h, dual_offset)
    weighted = grad * step_weight(rule, h.lr, step)  # λ_k g_k
    new_root = root(xp, rule, add_square(rule, step, power(rule, old_root), weighted, grad))
    if rule.never_falls:  # nor is it changed by rounding alone
        new_root = xp.where(weighted * grad == 0, old_root, new_root)
    force, away = weighted, None
    if rule.pulls:
        away = shrunk(h, initial_param) - param
        away = away if dual_offset is None else away - dual_offset
        away = xp.where(old_root == 0, 0.0, away)  # d_k = x_0 - z_k
        force = weighted - away * (new_root - old_root)
    # z_k - z_{k+1} = (λ_k g_k - d_k (r_{k+1} - r_k)) / (r_{k+1} + ε)
    move = xp.quotient(force, new_root + h.eps) + 0.0
    ahead = move if dual_offset is None else move - dual_offset  # x_k - z_{k+1}
    # x_{k+1} = (1-c) x_k + c z_{k+1}
    new_param, new_offset = store(param, ahead, param - ahead * (1 - h.momentum))
    return new_param, new_offset, new_root, None if away is None else away + move
