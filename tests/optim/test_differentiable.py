"""differentiable=True: autograd runs through several steps."""

import pytest
import torch
from cases import each_class

from cubegrad import MADGRAD, MADGRADW

OPTIONS = {
    "plain": {},
    "no-momentum": {"momentum": 0.0},
    "l2": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "maximize": {"maximize": True},
}


def run(cls, options, start, first, second, lr):
    """Two steps from `start` with the given gradients, as a function of all four."""
    param = start.clone()
    optimizer = cls([param], lr=lr, eps=1e-2, differentiable=True, **options)
    for grad in (first, second):
        param.grad = grad
        optimizer.step()
    return param


@pytest.mark.parametrize("options", OPTIONS)
@each_class
def test_first_and_second_derivatives_match_finite_differences(cls, options):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, dtype=torch.float64, generator=generator) for _ in range(3)]
    inputs = [t.requires_grad_() for t in tensors]
    inputs.append(torch.tensor(0.1, dtype=torch.float64, requires_grad=True))

    def function(*arguments):
        return run(cls, OPTIONS[options], *arguments)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_derivatives_through_a_change_of_momentum():
    def function(start, grad):
        param = start.clone()
        optimizer = MADGRAD([param], lr=0.1, eps=1e-2, momentum=0.0, differentiable=True)
        for momentum in (0.0, 0.9, 0.0, 0.5):
            optimizer.param_groups[0]["momentum"] = momentum
            param.grad = grad * (1 + momentum)
            optimizer.step()
        return param

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, dtype=torch.float64, generator=generator) for _ in range(2)]
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in inputs])


@each_class
def test_a_coordinate_without_gradient_has_a_finite_derivative(cls):
    """Its ν is 0, where a root has an infinite slope; the step's own slope is lr·√(k+1)/eps · c.

    MADGRADW holds x there, so its slope is 0.
    """
    start = torch.ones(2, dtype=torch.float64, requires_grad=True)
    grad = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    param = start.clone()
    optimizer = cls([param], lr=0.1, eps=1e-2, weight_decay=0.0, differentiable=True)
    param.grad = grad
    optimizer.step()
    slope, slope_start = torch.autograd.grad(param.sum(), (grad, start))
    expected = 0.0 if cls is MADGRADW else -0.1 * 0.1 / 1e-2
    assert slope[0].item() == pytest.approx(expected)
    assert torch.isfinite(slope).all()
    assert slope_start.tolist() == pytest.approx([1.0, 1.0])
