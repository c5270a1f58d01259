"""The paper's update: arrays in, arrays out. This is the one place the maths is written.

`xp` brings the functions that array libraries spell differently: `xp.cbrt(v)` is ∛v for v ≥ 0,
`xp.quotient(n, d)` is n/d, or 0 where 1/d is not finite. For an estimated learning rate,
`xp.total(v)` is the sum of all elements and `xp.where_finite(r, v)` is v, or 0 where r is not
finite; and of numbers, `xp.larger(a, b)` is the larger one, `xp.sqrt(a)` the root, and
`xp.where(c, a, b)` is a if c, else b.
`h` is one group's numbers for this step (`options.Hyper`). Any array type with operators
will do: a torch tensor, a list of them behind operators, a JAX array, a numpy array.

The order of operations is part of the rule. `λ g` is formed before it meets the second `g`,
so a zero step size yields 0 and not 0·∞ when g² overflows; and every move is a subtraction
of a difference, so a step that should move nothing changes no bit, not even the sign of a zero.
"""

from typing import Any

Array = Any
Scalar = Any
Hyper = Any
Namespace = Any


def step_weight(lr: Scalar, step: Scalar) -> Scalar:
    return lr * (step + 1) ** 0.5  # λ_k = γ_k √(k+1)


def loss_gradient(h: Hyper, grad: Array) -> Array:
    return -grad if h.maximize else grad


def effective_gradient(h: Hyper, param: Array, grad: Array) -> Array:
    """The gradient of what is minimised: -f under maximize, f + wd/2 ‖x‖² under coupled decay."""
    grad = loss_gradient(h, grad)
    if not isinstance(h.weight_decay, float | int) or h.weight_decay:  # an array may not be 0
        grad = grad + param * h.weight_decay
    return grad


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

    Decoupled decay multiplies x_k, x_0 and s_k, and with the last two z_k, by h.shrink. Were
    x alone shrunk, the averaging would pull it back to z; were x_0 alone moved to shrink z,
    the undiminished s_k would bring the decayed distance back whenever ν grows.
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


def sums(
    xp: Namespace,
    h: Hyper,
    step: Scalar,
    param: Array,
    grad: Array,
    old: tuple[Array, ...],
    new: tuple[Array, ...],
) -> tuple[Scalar, ...]:
    """What a step of MADGRAD tells an estimate of the learning rate.

    `param` is x_k; `old` and `new` are the buffers before and after the step. The g of the first
    sum is the loss's own: coupled decay pulls to 0 for ever, as if the solution were there.
    A coordinate whose ν is no longer finite counts for nothing, or it would stop the estimate.
    """
    weighted = loss_gradient(h, grad) * step_weight(h.lr, step)
    away = old[2] - param if len(old) == 3 else displacement(xp, h.eps, *old)  # x_0 - x_k
    root = xp.cbrt(new[1])
    agreement = xp.where_finite(root, weighted * away)
    return (xp.total(agreement), *_root_sums(xp, h, new[0], root))  # λ_k ⟨g_k, x_0 - x_k⟩


def state_sums(
    xp: Namespace, h: Hyper, grad_sum: Array, grad_sq_sum: Array
) -> tuple[Scalar, Scalar]:
    """Those of the sums that need no gradient."""
    return _root_sums(xp, h, grad_sum, xp.cbrt(grad_sq_sum))


def _root_sums(xp: Namespace, h: Hyper, grad_sum: Array, root: Array) -> tuple[Scalar, Scalar]:
    product = grad_sum * xp.quotient(grad_sum, root + h.eps)
    totals = xp.where_finite(root, product), xp.where_finite(root, root)
    return xp.total(totals[0]), xp.total(totals[1])  # ⟨s_k, x_0 - z_k⟩, Σ_i ∛ν_{k,i}


def first_distance(xp: Namespace, size: Scalar) -> Scalar:
    """D_0, from which the estimate grows; `size` is that of the weights with a gradient."""
    return xp.larger(size * 0.02, 1e-6)  # D_0 = rms(x_0) / 50, at least 1e-6


def first_scales(xp: Namespace, grad: Array) -> Array:
    """As `gradient_scale` has them, of the first gradient, before it has any weight."""
    root = xp.cbrt(abs(grad))  # g² could overflow
    return root * root  # |g_{0,i}|^{2/3}


def gradient_scale(root_sum: Scalar, weight_sum: Scalar) -> Scalar:
    """Σ_i H_i^{2/3}, where H_i² is the mean of g_i² weighted by λ: ν_i = H_i² Σλ."""
    return root_sum * weight_sum ** (-1 / 3)


def agreement(xp: Namespace, h: Hyper, so_far: Scalar, newest: Scalar) -> Scalar:
    """Decoupled decay makes less of it as it does of s, or the quotient of both would grow.

    A sum that is not finite is left out: the next one may be again.
    """
    newest = xp.where(newest - newest == 0, newest, 0.0)
    return shrunk(h, so_far) + newest  # Σ λ_i ⟨g_i, x_0 - x_i⟩


def distance(
    xp: Namespace, so_far: Scalar, agreement: Scalar, product: Scalar, root_sum: Scalar
) -> Scalar:
    """D: the largest lower bound so far on the distance to a solution, in root mean square.

    With A = diag(∛ν) the norms of s and x_0 - x* that belong to the method are those of A^{-1} and
    A, and ‖s‖ in the first is √⟨s, x_0 - z⟩. Over √tr A the other is a root mean square with
    weights ∛ν, as they are at that step.
    """
    norm = xp.sqrt(product) * xp.sqrt(root_sum)  # ‖s‖ √tr A
    return xp.larger(so_far, xp.quotient(agreement, norm))  # Σ λ_i ⟨g_i, x_0 - x_i⟩ / ‖s‖ √tr A


def estimated_lr(distance: Scalar, mean_scale: Scalar) -> Scalar:
    """The γ whose first step, γ^{2/3} |g|^{1/3}, has the root mean square D."""
    return distance**1.5 * mean_scale**-0.75  # γ = D^{3/2} H^{-1/2}, H^{2/3} the mean of H_i^{2/3}


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
