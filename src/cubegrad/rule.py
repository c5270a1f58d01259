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
Either = Callable[[Scalar, Scalar], Array]

WEIGHTED = "weighted"  # ν_{k+1} = ν_k + λ_k g_k²: a sum, which never falls
FADING = "fading"  # ν_{k+1} = √(k/(k+1)) ν_k + g_k²
AVERAGED = "averaged"  # ν_{k+1} = (1 - a_k) ν_k + a_k g_k², a_k = mean_weight(k)


class Moved(NamedTuple):
    """Where a step from the root leads, before rounding."""

    param: Array  # x_{k+1}
    offset: Callable[[], Array]  # z_{k+1} - x_{k+1}
    towards: Callable[[Scalar], Array]  # x_{k+1} and this part of the way from there to z_{k+1}
    offset_from: Callable[[Array], Array]  # z_{k+1} - x of an x that is stored rounded


Store = Callable[[Moved], tuple[Array, Any]]


class Rule(NamedTuple):
    """A method. Those without a pull move z by the newest gradient alone: mirror descent."""

    name: str
    root: int  # of ν in the denominator: 3 is ∛ν + ε, 2 is √ν + ε
    growth_root: int | None  # λ_k = γ_k times this root of k+1; None: λ_k = γ_k
    squares: str  # how g² enters ν: WEIGHTED, FADING or AVERAGED
    pulls: bool  # dual averaging: z_{k+1} = x_0 - s_{k+1} / (∛ν_{k+1} + ε)
    holds: bool = False  # x follows z only where that goes down by the newest gradient
    relative: bool = False  # z is kept as z - x: it moves with weights that are edited or loaded
    averages: bool = False  # schedule-free: x is the mean of all z, gradients are taken at y
    anchored: bool = False  # x_0 is kept though it pulls nothing: lr="auto" measures from there

    @property
    def point(self) -> str:
        """The buffer that only momentum needs: without it x is z, and x_0 follows from x."""
        if self.pulls:
            return "initial_param"
        return "dual_offset" if self.relative else "z"

    @property
    def has_estimate(self) -> bool:
        """Whether distance.py can estimate the learning rate."""
        return self.anchored or (self.pulls and self.root == 3)

    @property
    def keeps_start(self) -> bool:
        """Whether the state can say what x_0 was."""
        return self.pulls or self.anchored

    @property
    def never_falls(self) -> bool:
        """Whether ν only grows, so that a gradient of 0 leaves it unchanged."""
        return self.squares == WEIGHTED


MADGRAD = Rule("madgrad", root=3, growth_root=2, squares=WEIGHTED, pulls=True)
# With ν̃_k = ν_k √k this ν is the paper's sum for γ = 1: ν̃_{k+1} = ν̃_k + √(k+1) g². So
# ∛ν̃ = (k+1)^{1/6} ∛ν, and the paper's move √(k+1) g / ∛ν̃ is (k+1)^{1/3} g / ∛ν. A constant γ
# enters the paper's move as γ/∛γ = γ^{2/3}; here that whole factor is the learning rate.
MIRROR_MADGRAD = Rule("mirror_madgrad", root=3, growth_root=3, squares=FADING, pulls=False)
# With the square root a step does not depend on the size of the gradients, so γ and the decay are
# on AdamW's scale. With a mean for ν it does not depend on the weights of the squares either: with
# a sum, λ would have to grow as the root of the sum does.
MADGRADW = Rule(
    "madgradw",
    root=2,
    growth_root=None,
    squares=AVERAGED,
    pulls=False,
    holds=True,
    relative=True,
)
# The parameter is y = (1-β) z + β x, and z - y is kept. So x is y - (z - y) (1-β)/β.
SCHEDULE_FREE = MADGRADW._replace(name="madgradw_schedule_free", holds=False, averages=True)
MADGRADW_AUTO = MADGRADW._replace(name="madgradw_auto", anchored=True)
SCHEDULE_FREE_AUTO = SCHEDULE_FREE._replace(name="madgradw_schedule_free_auto", anchored=True)
RULES = (MADGRAD, MIRROR_MADGRAD, MADGRADW, SCHEDULE_FREE, MADGRADW_AUTO, SCHEDULE_FREE_AUTO)


def step_weight(rule: Rule, lr: Scalar, step: Scalar) -> Scalar:
    return lr if rule.growth_root is None else lr * (step + 1) ** (1 / rule.growth_root)  # λ_k


def mean_weight(step: Scalar) -> Scalar:
    """a_k of AVERAGED: newer squares weigh more, as the paper's weights √(k+1) have it."""
    return 1.5 / (step + 1.5)


def fade(rule: Rule, step: Scalar) -> Scalar:
    """What is left of ν where the gradient is 0."""
    if rule.squares == WEIGHTED:
        return 1.0
    return (step / (step + 1)) ** 0.5 if rule.squares == FADING else step / (step + 1.5)


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
    """∛ν, or √ν."""
    return xp.cbrt(grad_sq_sum) if rule.root == 3 else xp.sqrt(grad_sq_sum)


def power(rule: Rule, root_of: Array) -> Array:
    """ν, whose root this is."""
    return root_of * root_of * root_of if rule.root == 3 else root_of * root_of


def displacement(xp: Namespace, rule: Rule, eps: float, state: State) -> Array:
    """x_0 - z_k. A coordinate whose denominator is 0 has not left x_0."""
    denominator = root(xp, rule, state["grad_sq_sum"]) + eps  # ∛ν_k + ε
    return xp.quotient(state["grad_sum"], denominator)  # s_k / (∛ν_k + ε)


def recover_initial_param(
    xp: Namespace, rule: Rule, eps: float, param: Array, state: State
) -> Array:
    """x_0 from the state, for a run without momentum, where x_k is z_k."""
    return param + displacement(xp, rule, eps, state)  # x_0 = z_k + s_k / (∛ν_k + ε)


def average(param: Array, ahead: Array, share: Array) -> Array:
    """(1-c) x_k + c z_{k+1}; `ahead` is x_k - z_{k+1}, `share` is c."""
    return param - ahead * share


def held(xp: Namespace, rule: Rule, momentum: Scalar, ahead: Array, grad: Array) -> Either:
    """Chooses between a number for coordinates whose x is held and one for those that follow z.

    x is held where z lies uphill by the newest gradient, or that is 0. Without momentum x is z, and
    nothing is held.
    """
    if not rule.holds or (isinstance(momentum, int | float) and momentum == 0):
        return lambda _, follows: follows
    is_held = ahead * xp.sign(grad) <= (momentum == 0) * -3e38
    ones = ahead**0  # in its dtype
    return lambda holds, follows: xp.where(is_held, ones * holds, follows)


def towards_mean(h: Hyper, param: Array, move: Array, offset: Array) -> tuple[Array, Array]:
    """Where y would be if x took in nothing of z_{k+1}, and how far β x_k is ahead of β z_{k+1}.

    `param` is y_k, `offset` z_k - y_k, `move` z_k - z_{k+1}. If x takes in a share of z_{k+1},
    y_{k+1} is so much nearer to it, and z_{k+1} - y_{k+1} so much smaller.
    """
    return param - move * (1 - h.momentum), move * h.momentum - offset


def shrunk(h: Hyper, array: Array) -> Array:
    """Decoupled decay. h.shrink is 1 - γ_k wd, or None when there is no such decay."""
    return array if h.shrink is None else array * h.shrink


def decayed(rule: Rule, h: Hyper, array: Array) -> Array:
    """x or z after decoupled decay, unless x is a mean of all z: that decays as they do."""
    return array if rule.averages else shrunk(h, array)


def with_decay(rule: Rule, h: Hyper, param: Array, move: Array) -> Array:
    """The move of z; where x is a mean of all z, with decay in proportion to y."""
    if not rule.averages or h.shrink is None:
        return move
    return move + param * (1 - h.shrink)


def add_square(rule: Rule, step: Scalar, grad_sq_sum: Array, weighted: Array, grad: Array) -> Array:
    """ν_{k+1}; `weighted` is λ_k g_k."""
    if rule.squares == WEIGHTED:
        return grad_sq_sum + weighted * grad
    newest = grad if rule.squares == FADING else grad * mean_weight(step)
    return grad_sq_sum * fade(rule, step) + newest * grad


def step(
    xp: Namespace, rule: Rule, h: Hyper, step: Scalar, param: Array, grad: Array, state: State
) -> tuple[Array, dict[str, Array]]:
    """x and the state after one step; `step` is k, counted from 0.

    Without the rule's `point` in the state c is 1: then x is z. With a pull z_{k+1} is x_k moved by
    the change of the displacement, so x_0 need not be kept.

    Decoupled decay multiplies x_k, x_0 and s_k by h.shrink, and so z_k. If it shrank x alone, the
    averaging would pull x back to z. If it shrank z by moving x_0 alone, s_k would bring the
    decayed distance back whenever ν grows.
    """
    grad = effective_gradient(h, param, grad)
    param = decayed(rule, h, param)
    weighted = grad * step_weight(rule, h.lr, step)  # λ_k g_k
    new = {"grad_sq_sum": add_square(rule, step, state["grad_sq_sum"], weighted, grad)}
    if rule.anchored:
        new["initial_param"] = shrunk(h, state["initial_param"])
    if not rule.pulls:
        # Taking away a negative zero would turn -0 into 0.
        move = xp.quotient(weighted, root(xp, rule, new["grad_sq_sum"]) + h.eps) + 0.0
        move = with_decay(rule, h, param, move)
        if rule.point not in state:
            return param - move, new
        point = decayed(rule, h, state[rule.point])
        if rule.averages:
            param, ahead = towards_mean(h, param, move, point)
            new["dual_offset"] = ahead * (h.mean_share - 1)
            return param - ahead * h.mean_share, new
        if rule.relative:  # z_{k+1} = z_k - λ_k g_k / (∛ν_{k+1} + ε)
            ahead = move - point
        else:
            new["z"] = point - move
            ahead = param - new["z"]
        either = held(xp, rule, h.momentum, ahead, grad)
        new_param = average(param, ahead, either(0, 1 - h.momentum))
        if rule.relative:
            new["dual_offset"] = (param - new_param) - ahead
        return new_param, new
    del grad  # a list of tensors is large
    new["grad_sum"] = shrunk(h, state["grad_sum"]) + weighted  # s_{k+1} = s_k + λ_k g_k
    del weighted
    if "initial_param" not in state:
        old = shrunk(h, displacement(xp, rule, h.eps, state))
        move = displacement(xp, rule, h.eps, new) - old
        return param - move, new  # x_{k+1} = z_{k+1}
    new["initial_param"] = shrunk(h, state["initial_param"])
    dual_point = new["initial_param"] - displacement(xp, rule, h.eps, new)  # z_{k+1}
    return average(param, param - dual_point, 1 - h.momentum), new


def take_rounding(new: dict[str, Array], new_param: Array, stored: Array) -> None:
    """Keep z where it is, if it is kept as z - x and x is stored rounded."""
    if "dual_offset" in new:
        new["dual_offset"] = new["dual_offset"] + (new_param - stored)


def moved(
    xp: Namespace,
    rule: Rule,
    h: Hyper,
    param: Array,
    grad: Array,
    move: Array,
    dual_offset: Array | None,
) -> Moved:
    """`param` is x_k, `move` z_k - z_{k+1}, `dual_offset` z_k - x_k, or None where that is 0."""
    if rule.averages:
        param, ahead = towards_mean(h, param, move, dual_offset)
        share = h.mean_share
        new, offset = param - ahead * share, ahead * (share - 1)

        def towards_z(part: Scalar) -> Array:
            # A factor below 0 would make 0 of -0.
            return xp.where(ahead == 0, param, param - ahead * (share + (1 - share) * part))

        return Moved(new, lambda: offset, towards_z, lambda stored: offset + (new - stored))
    ahead = move if dual_offset is None else move - dual_offset  # x_k - z_{k+1}
    either = held(xp, rule, h.momentum, ahead, grad)

    def towards(part: Scalar) -> Array:
        return average(param, ahead, either(part, 1 - (1 - part) * h.momentum))

    return Moved(
        average(param, ahead, either(0, 1 - h.momentum)),  # (1-c) x_k + c z_{k+1}
        lambda: ahead * either(-1, -h.momentum),
        towards,
        lambda stored: (param - stored) - ahead,
    )


def unrounded(moved: Moved) -> tuple[Array, Array]:
    return moved.param, moved.offset_from(moved.param)


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
    store: Store | None = None,
) -> tuple[Array, Any, Array, Array | None]:
    """`step` from m = z - x, r = ∛ν and x_0, if it is kept: a form whose state can be rounded.

    With d = x_0 - z the sums are s = d (r + ε) and ν = r³, so z_{k+1} is the same as in `step`.
    There a rounding error of s or ν stays in a sum for good. Here one of r changes a coordinate's
    step size a little and moves nothing, and one of m can be put into x, where it fades.

    Without `dual_offset` c is 1, and x is z. A coordinate with r = 0 has had no gradient yet, so it
    has not left x_0, whatever rounding made of x_0. `store` makes of x and m what is stored.
    Returns these and r after the step, and x_0 - z_{k+1} if x_0 is kept.
    """
    grad = effective_gradient(h, param, grad)
    param = decayed(rule, h, param)
    dual_offset = None if dual_offset is None else decayed(rule, h, dual_offset)
    weighted = grad * step_weight(rule, h.lr, step)  # λ_k g_k
    new_root = root(xp, rule, add_square(rule, step, power(rule, old_root), weighted, grad))
    if rule.never_falls:  # nor is it changed by rounding alone
        new_root = xp.where(weighted * grad == 0, old_root, new_root)
    force, away = weighted, None
    if rule.keeps_start:
        away = shrunk(h, initial_param) - param
        away = away if dual_offset is None else away - dual_offset
        away = xp.where(old_root == 0, 0.0, away)  # d_k = x_0 - z_k
    if rule.pulls:
        force = weighted - away * (new_root - old_root)
    # z_k - z_{k+1} = (λ_k g_k - d_k (r_{k+1} - r_k)) / (r_{k+1} + ε)
    move = with_decay(rule, h, param, xp.quotient(force, new_root + h.eps) + 0.0)
    store = store or unrounded
    new_param, new_offset = store(moved(xp, rule, h, param, grad, move, dual_offset))
    return new_param, new_offset, new_root, None if away is None else away + move
