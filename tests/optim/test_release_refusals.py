"""What gradient release cannot do is refused, with the remedy, and parameters are left alone."""

import cases
import pytest
import released_runs
import torch
from released_runs import Net, assert_same, loss_of, pair, train
from short_runs import ones
from torch import nn

from cubegrad import MADGRAD
from cubegrad.optim import release, release_checks


@pytest.fixture(autouse=True)
def _small_line(monkeypatch):
    monkeypatch.setattr(release.GradientRelease, "held_bytes", released_runs.HELD_BYTES)


def released(**options):
    model = Net()
    optimizer = MADGRAD(model.parameters(), **options)
    optimizer.release_gradients()
    return model, optimizer


def test_twice():
    _, optimizer = released()
    before = optimizer._release
    with pytest.raises(RuntimeError, match=r"called already.*call it once"):
        optimizer.release_gradients()
    assert optimizer._release is before


def test_by_two_optimizers():
    model, optimizer = released()
    other = MADGRAD(model.last.parameters())
    with pytest.raises(RuntimeError, match=r"params\[0\] is stepped .* another optimizer"):
        other.release_gradients()
    optimizer._release.remove()
    other.release_gradients()


def test_differentiable_steps():
    param = ones(400)
    optimizer = MADGRAD([param], differentiable=True)
    with pytest.raises(RuntimeError, match="differentiable=False"):
        optimizer.release_gradients()
    assert not param._post_accumulate_grad_hooks
    optimizer = MADGRAD([param])
    optimizer.release_gradients()
    optimizer.param_groups[0]["differentiable"] = True
    with cases.no_change(param), pytest.raises(RuntimeError, match="differentiable=False"):
        param.sum().backward()


@pytest.mark.parametrize("auto", [False, True])
def test_accumulation_over_two_backward_passes(auto):
    """The parameter is left alone, its second gradient is dropped, and step() ends the step."""
    one, other = pair(lambda model: MADGRAD(model.last.parameters(), lr="auto" if auto else 0.01))
    train(*one, steps=range(4))
    train(*other, steps=range(3))
    model, optimizer = other
    model.last.bias.requires_grad_(False)
    loss_of(model, 3).backward()
    with (
        cases.no_change(model.last.weight),
        pytest.raises(RuntimeError, match=r"params\[0\] got a second gradient.*handle.remove"),
    ):
        loss_of(model, 4).backward()
    assert model.last.weight.grad is None
    optimizer.step()
    assert not optimizer._release.is_open
    for weight in (one[0].last.weight, model.last.weight):
        assert weight.isfinite().all()
    if not auto:
        assert cases.same_bits(one[0].last.weight.detach(), model.last.weight.detach())


def test_accumulation_in_a_small_parameter():
    param = ones(3)
    optimizer = MADGRAD([param], lr=0.1)
    optimizer.release_gradients()
    param.sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        param.sum().backward()
    with cases.no_change(param), pytest.raises(RuntimeError, match="changed after backward"):
        optimizer.step()
    optimizer.zero_grad()
    with cases.no_change(param):
        optimizer.step()
    param.sum().backward()
    optimizer.step()
    assert optimizer.state[param]["step"] == 1


def test_a_graph_that_is_used_twice():
    model, optimizer = released()
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second gradient|modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.step()
    train(model, optimizer, range(2))


def test_two_losses_over_different_parameters():
    one, other = pair(lambda model: MADGRAD([*model.last.parameters(), *model.twice.parameters()]))
    x = torch.randn(3, released_runs.WIDTH)
    for model, optimizer in (one, other):
        for _ in range(3):
            model.last(x).square().sum().backward()
            model.twice(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert cases.same_bits(p.detach(), q.detach())


def test_gradients_that_would_be_thrown_away():
    """The generator's loss also reaches the discriminator, whose gradients a GAN's loop drops."""
    generator, discriminator = nn.Linear(64, 64), nn.Linear(64, 64)
    optimizer = MADGRAD(discriminator.parameters())
    optimizer.release_gradients()
    discriminator(generator(torch.ones(1, 64))).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="second gradient before step"):
        discriminator(torch.ones(1, 64)).sum().backward()


def test_a_backward_pass_that_fails_is_ended_by_step():
    """Parameters that had their gradient have stepped; the others have not, as if unused."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = MADGRAD(model.parameters())
    optimizer.release_gradients()

    def fail(_):
        raise ValueError("out of memory, say")

    first = model[0](torch.randn(2, 64))
    handle = first.register_hook(fail)
    with pytest.raises(ValueError, match="out of memory"):
        model[1](first).sum().backward()
    handle.remove()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="also after one that has failed"):
        model(torch.randn(2, 64)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert set(optimizer.state) == {model[1].weight}
    for _ in range(2):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps = [optimizer.state[p]["step"].item() for p in model.parameters()]
    assert steps == [2, 2, 3, 2]


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_grad_scaler(fused, unscale):
    model, optimizer = released(fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with (
        cases.no_change(*model.parameters()),
        pytest.raises(RuntimeError, match=r"GradScaler .* bfloat16"),
    ):
        scaler.step(optimizer)


def test_a_grad_scaler_that_is_switched_off():
    one, other = pair(lambda model: MADGRAD(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for model, optimizer in (one, other):
        for k in range(3):
            scaler.scale(loss_of(model, k)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert_same(one, other)


@pytest.mark.parametrize("name", ["found_inf", "grad_scale"])
def test_what_a_grad_scaler_leaves_at_the_optimizer(name):
    model, optimizer = released()
    setattr(optimizer, name, torch.zeros(()))
    with cases.no_change(*model.parameters()), pytest.raises(RuntimeError, match="GradScaler"):
        loss_of(model, 0).backward()


def test_a_cuda_graph(monkeypatch):
    model, optimizer = released(capturable=True)
    monkeypatch.setattr(release_checks, "capturing", lambda: True)
    with cases.no_change(*model.parameters()):
        with pytest.raises(RuntimeError, match=r"captured in a CUDA graph.*ordinary steps"):
            loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"captured in a CUDA graph.*ordinary steps"):
            optimizer.step()


def test_a_step_that_raises_leaves_its_parameter_alone():
    model, optimizer = released()
    train(model, optimizer, range(2))
    optimizer.state[model.last.weight].pop("grad_sq_sum")
    with (
        cases.no_change(model.last.weight),
        pytest.raises(ValueError, match="put states in with load_state_dict"),
    ):
        loss_of(model, 2).backward()
    assert model.last.weight.grad is not None
    del optimizer.state[model.last.weight]
    optimizer.step()  # it can step now
    assert optimizer.state[model.last.weight]["step"] == 1


@pytest.mark.parametrize("is_named", [False, True])
def test_messages_name_the_parameter(is_named):
    """Whether it is refused during backward or in step()."""
    params = {"a": ones(3), "large": ones(400), "small": ones(5)}
    optimizer = MADGRAD(params.items() if is_named else params.values())
    optimizer.release_gradients()
    optimizer.state[params["large"]] = {"step": torch.tensor(1.0)}
    optimizer.state[params["small"]] = {"step": torch.tensor(1.0)}
    with pytest.raises(ValueError, match="state of large" if is_named else r"of params\[1\] is"):
        params["large"].sum().backward()
    optimizer.zero_grad()
    (params["a"].sum() + params["small"].sum()).backward()
    with pytest.raises(ValueError, match="state of small" if is_named else r"of params\[2\] is"):
        optimizer.step()


def test_decay_beyond_its_limit():
    model, optimizer = released(weight_decay=1.0, decoupled_weight_decay=True)
    optimizer.param_groups[0]["lr"] = 2.0
    with cases.no_change(*model.parameters()), pytest.raises(ValueError, match="lower weight"):
        loss_of(model, 0).backward()
