"""MADGRAD in flax nnx: accumulated gradients, and a learning rate that you change by hand."""

import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array, random

from cubegrad.optax import madgrad

ACCUMULATE = 4  # batches per update


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(2, 64, rngs=rngs)
        self.outer = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, points: Array) -> Array:
        return self.outer(nnx.relu(self.inner(points)))


def mean_loss(model: MLP, points: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(points), labels).mean()


@nnx.jit
def train_step(model: MLP, optimizer: nnx.Optimizer, points: Array, labels: Array) -> Array:
    loss, grads = nnx.value_and_grad(mean_loss)(model, points, labels)
    optimizer.update(model, grads)
    return loss


def build(learning_rate: float = 1e-2) -> tuple[MLP, nnx.Optimizer]:
    model = MLP(nnx.Rngs(0))
    tx = optax.inject_hyperparams(madgrad)(learning_rate)  # puts the rate into the state
    tx = optax.MultiSteps(tx, ACCUMULATE).gradient_transformation()
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def main(epochs: int = 6) -> tuple[MLP, nnx.Optimizer]:
    model, optimizer = build()
    points = random.normal(random.key(0), (1024, 2))
    labels = (jnp.linalg.norm(points, axis=1) > 1.2).astype(int)  # inside or outside a circle
    rate = optimizer.opt_state.inner_opt_state.hyperparams["learning_rate"]
    for epoch in range(epochs):
        order = random.permutation(random.key(epoch), len(points))
        for batch in order.reshape(-1, 16):
            train_step(model, optimizer, points[batch], labels[batch])
        loss = mean_loss(model, points, labels)
        print(f"epoch {epoch}: loss {loss:.3f} at a learning rate of {rate[...]:.3g}")
        rate[...] *= 0.7
    return model, optimizer


if __name__ == "__main__":
    main()
