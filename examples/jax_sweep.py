"""How sensitive are MADGRAD and Adam to their learning rate? A whole sweep in one program.

A training run of a small network on scikit-learn's handwritten digits is a function of (learning
rate, seed). `jax.vmap` over both turns it into a grid of runs, compiled to one program.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import cubegrad
import cubegrad.optax

BATCH, WIDTH, CLASSES = 64, 32, 10
SPLIT_SEED = 0
Params = dict[str, Array]
Make = Callable[[Array], optax.GradientTransformation]

# For each method: its factory, its colour (from the Okabe-Ito palette), its line style.
METHODS: dict[str, tuple[Make, str, str]] = {
    "MADGRAD": (cubegrad.optax.madgrad, "#D55E00", "o-"),
    "MirrorMADGRAD": (cubegrad.optax.mirror_madgrad, "#0072B2", "s--"),
    "Adam": (optax.adam, "#009E73", "^-."),
}
# For each method: test accuracy in %, seed x learning rate.
Results = dict[str, np.ndarray]


def digits() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The images and labels of the training set and of the test set."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    images, labels = jnp.asarray(images[order] / 16, jnp.float32), jnp.asarray(labels[order])
    cut = int(0.7 * len(labels))
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


def network(key: Array, features: int) -> Params:
    first, second = jax.random.split(key)
    return {
        "inner": jax.random.normal(first, (features, WIDTH)) * (2 / features) ** 0.5,
        "inner_bias": jnp.zeros(WIDTH),
        "outer": jax.random.normal(second, (WIDTH, CLASSES)) * (1 / WIDTH) ** 0.5,
        "outer_bias": jnp.zeros(CLASSES),
    }


def scores(params: Params, images: Array) -> Array:
    hidden = jax.nn.relu(images @ params["inner"] + params["inner_bias"])
    return hidden @ params["outer"] + params["outer_bias"]


def loss(params: Params, images: Array, labels: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(scores(params, images), labels)
    return losses.mean()


def accuracy(
    make: Make,
    steps: int,
    data: tuple[Array, Array],
    unseen: tuple[Array, Array],
    learning_rate: Array,
    seed: Array,
) -> Array:
    """The accuracy on `unseen` in %, after training on `data`."""
    start, batches = jax.random.split(jax.random.key(seed))
    images, labels = data
    params, tx = network(start, images.shape[1]), make(learning_rate)

    def step(carry: tuple[Params, optax.OptState], key: Array) -> tuple[object, None]:
        params, state = carry
        batch = jax.random.choice(key, len(labels), (BATCH,))
        grads = jax.grad(loss)(params, images[batch], labels[batch])
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = lax.scan(step, (params, tx.init(params)), jax.random.split(batches, steps))
    return 100 * (scores(params, unseen[0]).argmax(1) == unseen[1]).mean()


def sweep(rates: Array, seeds: Array, steps: int) -> Results:
    data, unseen = digits()
    results = {}
    for name, (make, *_) in METHODS.items():
        train = partial(accuracy, make, steps, data, unseen)
        over_rates = jax.vmap(train, in_axes=(0, None))
        grid = jax.jit(jax.vmap(over_rates, in_axes=(None, 0)))
        results[name] = np.asarray(grid(rates, seeds))
    return results


def mean_and_error(samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the first dimension and twice its standard error."""
    return samples.mean(0), 2 * samples.std(0, ddof=1) / len(samples) ** 0.5


def table(rates: Array, results: Results) -> str:
    """Each method's best learning rate, and the range within 2 points of its accuracy."""
    lines = [f"{'method':<14} {'best lr':>9} {'test acc. %':>14}   within 2 points"]
    for name, grid in results.items():
        mean, error = mean_and_error(grid)
        best = int(mean.argmax())
        good = np.asarray(rates)[mean >= mean[best] - 2]
        row = f"{name:<14} {rates[best]:>9.2g} {mean[best]:>7.2f} ± {error[best]:.2f} "
        lines.append(f"{row}  {good.min():.2g} to {good.max():.2g}")
    return "\n".join(lines)


def plot(rates: Array, results: Results, steps: int) -> Figure:
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for name, grid in results.items():
        _, colour, line = METHODS[name]
        mean, error = mean_and_error(grid)
        axes.plot(rates, mean, line, color=colour, label=name, markersize=4)
        axes.fill_between(rates, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    axes.set(xscale="log", xlabel="learning rate", ylabel="test accuracy, %", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower center")
    seeds = len(next(iter(results.values())))
    versions = f"cubegrad {cubegrad.__version__}, jax {jax.__version__}, optax {optax.__version__}"
    axes.set_title(
        f"Digits, one hidden layer, {steps} steps: mean of {seeds} seeds ± 2 standard errors\n"
        f"{versions}",
        fontsize=10.5,
    )
    return figure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rates", type=int, default=17, help="learning rates from 1e-5 to 10 (%(default)s)")
    add("--seeds", type=int, default=5, help="runs at each rate (%(default)s)")
    add("--steps", type=int, default=400, help="steps of each run (%(default)s)")
    add("--out", type=Path, default=Path("out/jax_sweep.png"), help="the plot (%(default)s)")
    add("--quick", action="store_true", help="at most 7 rates, 2 seeds and 100 steps")
    options = parser.parse_args()
    for name in ("rates", "seeds", "steps"):
        if (value := getattr(options, name)) < 2:  # for a standard error, and for a line
            parser.error(f"--{name} {value} must be >= 2; use {parser.get_default(name)}")
    if options.out.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--out {options.out} must end in .png, .pdf or .svg; use out/jax_sweep.png")
    if options.quick:
        options.rates, options.seeds = min(options.rates, 7), min(options.seeds, 2)
        options.steps = min(options.steps, 100)
    return options


def main() -> None:
    options = arguments()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rates = jnp.logspace(-5, 1, options.rates)
    results = sweep(rates, jnp.arange(options.seeds), options.steps)
    runs = options.rates * options.seeds
    print(f"{table(rates, results)}\n\n{runs} runs per method, each method one program.")
    plot(rates, results, options.steps).savefig(options.out, dpi=150)
    print(f"Plot: {options.out}")


if __name__ == "__main__":
    main()
