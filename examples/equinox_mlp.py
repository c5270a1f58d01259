"""Fine-tuning with MADGRAD in equinox: first a new head alone, then everything at two rates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array, random

from cubegrad.optax import madgrad


def mean_loss(model: dict, points: Array, labels: Array) -> Array:
    scores = jax.vmap(lambda point: model["head"](jax.nn.relu(model["body"](point))))(points)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def train(model: dict, tx: optax.GradientTransformation, data: tuple, steps: int) -> dict:
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: dict, state: optax.OptState, batch: tuple) -> tuple[dict, optax.OptState]:
        grads = eqx.filter_grad(mean_loss)(model, *batch)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)  # MADGRAD needs the params
        return eqx.apply_updates(model, updates), state

    for key in random.split(random.key(0), steps):
        rows = random.choice(key, len(data[0]), (64,))
        model, state = step(model, state, (data[0][rows], data[1][rows]))
    return model


def head_only(learning_rate: float) -> optax.GradientTransformation:
    """`masked` keeps no state for the body, but passes its gradients on: set those to zero."""
    return optax.chain(
        optax.masked(madgrad(learning_rate), {"body": False, "head": True}),
        optax.masked(optax.set_to_zero(), {"body": True, "head": False}),
    )


def two_rates(body: float, head: float) -> optax.GradientTransformation:
    rates = {"slow": madgrad(body), "fast": madgrad(head)}
    return optax.multi_transform(rates, {"body": "slow", "head": "fast"})


def main(steps: int = 200) -> dict:
    points = random.normal(random.key(1), (1024, 2))
    data = points, (jnp.linalg.norm(points, axis=1) > 1.2).astype(int)
    body, head = random.split(random.key(2))
    model = {"body": eqx.nn.Linear(2, 64, key=body), "head": eqx.nn.Linear(64, 2, key=head)}
    for tx in (head_only(1e-2), two_rates(body=2e-3, head=1e-2)):
        model = train(model, tx, data, steps)
        print(f"loss {mean_loss(model, *data):.3f}")
    return model


if __name__ == "__main__":
    main()
