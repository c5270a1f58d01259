"""The recipes for flax and equinox do what docs/recipes.md says."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
nnx = pytest.importorskip("flax.nnx")
eqx = pytest.importorskip("equinox")
from jax import numpy as jnp  # noqa: E402

from cubegrad.optax import madgrad  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.training, pytest.mark.compilation]


@pytest.fixture
def recipe(monkeypatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def batch() -> tuple[jax.Array, jax.Array]:
    points = jax.random.normal(jax.random.key(0), (64, 2))
    return points, (points[:, 0] > 0).astype(int)


def close(first: object, second: object) -> bool:
    """Up to the order in which a mean is added."""
    near = jax.tree.map(lambda a, b: bool(jnp.allclose(a, b, rtol=1e-5, atol=1e-6)), first, second)
    return all(jax.tree.leaves(near))


def moved(before: object, after: object) -> list[float]:
    """How far each array has moved."""
    change = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, after)
    return jax.tree.leaves(change)


def test_flax_learns_while_its_rate_is_changed(recipe, capsys):
    module = recipe("flax_nnx")
    _, optimizer = module.main(epochs=4)
    output = capsys.readouterr().out
    rates = [float(rate) for rate in re.findall(r"rate of ([\d.e-]+)", output)]
    assert rates == pytest.approx([1e-2, 7e-3, 4.9e-3, 3.43e-3])
    state = nnx.state(optimizer)["opt_state"]["inner_opt_state"]
    assert state["hyperparams"]["learning_rate"][...] == pytest.approx(1e-2 * 0.7**4)
    assert losses(output)[-1] < 0.4  # 0.25 to 0.27 with 3 seeds; ln 2 = 0.69 at first


def params(model: object) -> object:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def test_multi_steps_in_flax_are_steps_of_a_large_batch(recipe):
    module = recipe("flax_nnx")
    model, optimizer = module.build(1e-2)
    large = module.MLP(nnx.Rngs(0))
    one_step = nnx.Optimizer(large, madgrad(1e-2), wrt=nnx.Param)
    points, labels = batch()
    for _ in range(3):
        before = params(model)
        for rows in jnp.arange(64).reshape(4, 16):
            assert not any(moved(before, params(model)))
            module.train_step(model, optimizer, points[rows], labels[rows])
        assert all(moved(before, params(model)))
        module.train_step(large, one_step, points, labels)
        assert close(params(model), params(large))


def test_a_rate_set_in_flax_is_that_of_the_next_step(recipe):
    module = recipe("flax_nnx")
    (model, optimizer), (other, same) = module.build(1e-2), module.build(5e-3)
    rate = optimizer.opt_state.inner_opt_state.hyperparams["learning_rate"]
    rate[...] /= 2
    for _ in range(module.ACCUMULATE):
        module.train_step(model, optimizer, *batch())
        module.train_step(other, same, *batch())
    assert not any(moved(params(model), params(other)))


def model_in_equinox() -> dict[str, object]:
    body, head = jax.random.split(jax.random.key(0))
    return {"body": eqx.nn.Linear(2, 8, key=body), "head": eqx.nn.Linear(8, 2, key=head)}


def test_equinox_learns(recipe, capsys):
    recipe("equinox_mlp").main(steps=100)
    head, everything = losses(capsys.readouterr().out)
    assert everything < head < 0.4  # 0.10 to 0.11, 0.18 to 0.19 with 3 seeds; ln 2 at first


def test_masked_leaves_stay_as_they_are(recipe):
    model, module = model_in_equinox(), recipe("equinox_mlp")
    tx = module.head_only(1e-2)
    trained = module.train(model, tx, batch(), steps=3)
    assert moved(model["body"], trained["body"]) == [0, 0]
    assert all(moved(model["head"], trained["head"]))
    arrays = [leaf for leaf in jax.tree.leaves(tx.init(model)) if leaf.ndim]
    kept = {leaf.shape for leaf in arrays}
    assert kept == {(2, 8), (2,)}, "only the head has a state"


def test_multi_transform_gives_each_part_its_rate(recipe):
    model, module = model_in_equinox(), recipe("equinox_mlp")
    trained = module.train(model, module.two_rates(body=2e-3, head=1e-2), batch(), steps=1)
    for part, rate in {"body": 2e-3, "head": 1e-2}.items():
        alone = module.train(model, madgrad(rate), batch(), steps=1)
        assert close(trained[part], alone[part])
        other = "head" if part == "body" else "body"
        assert not close(trained[other], alone[other])
