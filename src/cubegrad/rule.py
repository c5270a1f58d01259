"""Algorithm 1 of the paper and its mirror form: arrays in, arrays out.

The eager and foreach backends and the JAX twin run these functions. The Triton and C kernels
restate them, and one grid of tests holds every backend to the same float64 oracle.

`xp` brings the functions that array libraries spell differently: `xp.cbrt(v)` is ∛v for v ≥ 0,
`xp.quotient(n, d)` is n/d, or 0 where 1/d is not finite, `xp.where(c, a, b)` is a where c, else b.
`h` is one group's numbers for this step (`options.Hyper`). Any array type with operators will do: a
torch tensor, a list of tensors, a JAX array, a numpy array.

The order of operations is part of the rule. `λ g` is formed before it is multiplied by the second
`g`, so a step size of 0 gives 0 and not 0·∞ when g² overflows. Every move is a subtraction of a
difference, so a step that should move nothing changes no bit, not even the sign of a zero.
"""

from collections.abc import Callable
from typing import Any

Array = Any
Scalar = Any
Hyper = Any
Namespace = Any
Store = Callable[[Array, Array, Array], tuple[Array, Any]]


def step_weight(lr: Scalar, step: Scalar) -> Scalar:
    return lr * (step + 1) ** 0.5  # λ_k = γ_k √(k+1)


def loss_gradient(h: Hyper, grad: Array) -> Array:
    return -grad if h.maximize else grad


def has_coupled_decay(h: Hyper) -> bool:
    """True for an array, whatever its value: to ask for it would wait for the device."""
    return not isinstance(h.weight_decay, float | int) or h.weight_decay != 0


def effective_gradient(h: Hyper, param: Array, grad: Array) -> Array:
    """The gradient of what is minimised: -f under maximize, f + wd/2 ‖x‖² under coupled decay."""
    grad = loss_gradient(h, grad)
    return grad + param * h.weight_decay if has_coupled_decay(h) else grad


def displacement(xp: Namespace, eps: float, grad_sum: Array, grad_sq_sum: Array) -> Array:
    """x_0 - z_k. A coordinate whose denominator is 0 has not left x_0."""
    denominator = xp.cbrt(grad_sq_sum) + eps  # ∛ν_k + ε
    return xp.quotient(grad_sum, denominator)  # s_k / (∛ν_k + ε)


def recover_initial_param(
    xp: Namespace, eps: float, param: Array, grad_sum: Array, grad_sq_sum: Array
) -> Array:
    """x_0 from the state, for a run without momentum, where x_k is z_k."""
    return param + displacement(xp, eps, grad_sum, grad_sq_sum)  # x_0 = z_k + s_k / (∛ν_k + ε)


def average(param: Array, dual_point: Array, momentum: Scalar) -> Array:
    return param - (param - dual_point) * (1 - momentum)  # x_{k+1} = (1-c) x_k + c z_{k+1}


def shrunk(h: Hyper, array: Array) -> Array:
    """Decoupled decay. h.shrink is 1 - γ_k wd, or None when there is no such decay."""
    return array if h.shrink is None else array * h.shrink


def madgrad(
    xp: Namespace,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    grad_sum: Array,
    grad_sq_sum: Array,
    initial_param: Array | None = None,
) -> tuple[Array, ...]:
    """One step of Algorithm 1; `step` is k, counted from 0.

    Without `initial_param` c is 1: then x is z, and z_{k+1} is x_k moved by the change of the
    displacement, so x_0 need not be kept.

    Decoupled decay multiplies x_k, x_0 and s_k by h.shrink, and so z_k. If it shrank x alone, the
    averaging would pull x back to z. If it shrank z by moving x_0 alone, s_k would bring the
    decayed distance back whenever ν grows.
    """
    grad = effective_gradient(h, param, grad)
    param = shrunk(h, param)
    old_sum, old_sq_sum, grad_sum = grad_sum, grad_sq_sum, shrunk(h, grad_sum)
    weighted = grad * step_weight(h.lr, step)  # λ_k g_k
    grad_sum = grad_sum + weighted  # s_{k+1} = s_k + λ_k g_k
    grad_sq_sum = grad_sq_sum + weighted * grad  # ν_{k+1} = ν_k + λ_k g_k∘g_k
    del weighted, grad  # a list of tensors is large
    if initial_param is None:
        old = shrunk(h, displacement(xp, h.eps, old_sum, old_sq_sum))
        move = displacement(xp, h.eps, grad_sum, grad_sq_sum) - old
        return param - move, grad_sum, grad_sq_sum  # x_{k+1} = z_{k+1}
    initial_param = shrunk(h, initial_param)
    dual_point = initial_param - displacement(xp, h.eps, grad_sum, grad_sq_sum)  # z_{k+1}
    return average(param, dual_point, h.momentum), grad_sum, grad_sq_sum, initial_param


def mirror_madgrad(
    xp: Namespace,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    grad_sq_sum: Array,
    z: Array,
) -> tuple[Array, ...]:
    """One step of the mirror-descent form: z moves by the newest gradient alone.

    With ν̃_k = ν_k √k the recurrence below is ν̃_{k+1} = ν̃_k + √(k+1) g², the paper's sum
    for γ = 1, so ∛ν̃ = (k+1)^{1/6} ∛ν and the paper's move √(k+1) g / ∛ν̃ is
    (k+1)^{1/3} g / ∛ν. A constant γ enters the paper's move as γ/∛γ = γ^{2/3}; here that
    whole factor is the learning rate.
    """
    grad = effective_gradient(h, param, grad)
    param, z = shrunk(h, param), shrunk(h, z)
    grad_sq_sum = grad_sq_sum * (step / (step + 1)) ** 0.5 + grad * grad  # ν_{k+1}
    denominator = xp.cbrt(grad_sq_sum) + h.eps  # ∛ν_{k+1} + ε
    rate = h.lr * (step + 1) ** (1 / 3)
    move = xp.quotient(grad * rate, denominator)  # γ (k+1)^{1/3} g_k / (∛ν_{k+1} + ε)
    z = z - (move + 0.0)  # z_{k+1}; taking away a negative zero would turn -0 into 0
    return average(param, z, h.momentum), grad_sq_sum, z


def unrounded(param: Array, ahead: Array, new_param: Array) -> tuple[Array, Array]:
    """x_{k+1} and z_{k+1} - x_{k+1}; `param` is x_k, `ahead` x_k - z_{k+1}."""
    return new_param, (param - new_param) - ahead


def madgrad_from_root(
    xp: Namespace,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    dual_offset: Array | None,
    root: Array,
    initial_param: Array,
    store: Store = unrounded,
) -> tuple[Array, ...]:
    """`madgrad` from m = z - x, r = ∛ν and x_0, a form whose state survives being rounded.

    With d = x_0 - z the sums are s = d (r + ε) and ν = r³, so z_{k+1} is the same as in `madgrad`.
    There a rounding error of s or ν stays in a sum for good. Here one of r changes a coordinate's
    step size a little and moves nothing, and one of m can be put into x, where it fades.

    Without `dual_offset` c is 1, and x is z. A coordinate with r = 0 has had no gradient yet, so it
    has not left x_0, whatever rounding made of x_0. `store` makes of x and m what is stored.
    Returns these and r after the step, and x_0 - z_{k+1} for `distance.step_sums_from_root`.
    """
    grad = effective_gradient(h, param, grad)
    param, initial_param = shrunk(h, param), shrunk(h, initial_param)
    weighted = grad * step_weight(h.lr, step)  # λ_k g_k
    growth = weighted * grad
    new_root = xp.cbrt(root * root * root + growth)  # r_{k+1} = ∛(r_k³ + λ_k g_k∘g_k)
    new_root = xp.where(growth == 0, root, new_root)  # not changed by rounding alone
    away = initial_param - param
    if dual_offset is not None:
        dual_offset = shrunk(h, dual_offset)
        away = away - dual_offset
    away = xp.where(root == 0, 0.0, away)  # d_k = x_0 - z_k
    # z_k - z_{k+1} = (λ_k g_k - d_k (r_{k+1} - r_k)) / (r_{k+1} + ε)
    move = xp.quotient(weighted - away * (new_root - root), new_root + h.eps) + 0.0
    new_param, new_offset = _averaged(h, param, dual_offset, move, store)
    return new_param, new_offset, new_root, away + move


def mirror_madgrad_from_root(
    xp: Namespace,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    dual_offset: Array | None,
    root: Array,
    store: Store = unrounded,
) -> tuple[Array, ...]:
    """`mirror_madgrad` from m = z - x and r = ∛ν, as `madgrad_from_root`; returns x, m and r."""
    grad = effective_gradient(h, param, grad)
    param = shrunk(h, param)
    dual_offset = None if dual_offset is None else shrunk(h, dual_offset)
    fade = (step / (step + 1)) ** 0.5
    new_root = xp.cbrt(root * root * root * fade + grad * grad)  # r_{k+1} = ∛ν_{k+1}
    rate = h.lr * (step + 1) ** (1 / 3)
    move = xp.quotient(grad * rate, new_root + h.eps) + 0.0  # z_k - z_{k+1}
    return (*_averaged(h, param, dual_offset, move, store), new_root)


def _averaged(
    h: Hyper,
    param: Array,
    dual_offset: Array | None,
    move: Array,
    store: Store,
) -> tuple[Array, Any]:
    """x and z - x after z has moved by -move, as they are stored."""
    ahead = move if dual_offset is None else move - dual_offset  # x_k - z_{k+1}
    return store(param, ahead, param - ahead * (1 - h.momentum))  # x_{k+1} = (1-c) x_k + c z_{k+1}
