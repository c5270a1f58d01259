"""MADGRAD beside SGD with momentum, Adam and AdaGrad on scikit-learn's handwritten digits.

One seed chooses each method's learning rate, on a validation part of the training set; other
seeds then train with it on the whole training set. The test set is measured and decides nothing.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset as Data
from tqdm import tqdm

import cubegrad

BATCH = 64
SPLIT_SEED, SEARCH_SEED, FIRST_SEED = 0, 1, 2
# By method: the learning rate, and seed x epoch x (train loss, test loss, test accuracy in %).
Results = dict[str, tuple[float, Tensor]]


class Method(NamedTuple):
    make: Callable[..., Optimizer]
    centre: int  # of the first grid of learning rates, as a rung of `rate`
    colour: str  # Okabe and Ito's, which colour-blind readers can tell apart
    line: str


METHODS = {
    "MADGRAD": Method(cubegrad.MADGRAD, -3, "#D55E00", "-"),
    "SGD": Method(partial(SGD, momentum=0.9), -3, "#0072B2", "--"),
    "Adam": Method(Adam, -4, "#009E73", "-."),
    "AdaGrad": Method(Adagrad, -3, "#CC79A7", ":"),
}


def digits() -> Data:
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    return Data(images.float().view(-1, 1, 8, 8) / 16, labels)


def split(data: Data, share: float, generator: Generator) -> tuple[Data, Data]:
    """Two parts at random, the first with this share of every class."""
    order = torch.randperm(len(data), generator=generator)
    labels = data.tensors[1][order]
    classes = [order[labels == label] for label in labels.unique()]
    first = torch.cat([members[: round(share * len(members))] for members in classes])
    second = torch.cat([members[round(share * len(members)) :] for members in classes])
    return Data(*data[first]), Data(*data[second])


def network(generator: Generator) -> nn.Module:
    convolutions = (nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU())
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    for param in model.parameters():
        if param.ndim == 1:
            nn.init.zeros_(param)
        else:
            nn.init.kaiming_uniform_(param, nonlinearity="relu", generator=generator)
    return model


@torch.no_grad()
def measure(model: nn.Module, data: Data) -> tuple[float, float]:
    """Mean loss, and accuracy in %."""
    images, labels = data.tensors
    scores = model(images)
    right = (scores.argmax(1) == labels).sum().item()
    return cross_entropy(scores, labels).item(), 100 * right / len(labels)


def train(
    method: Method, lr: float, seed: int, data: Data, unseen: Data, epochs: int
) -> list[tuple[float, float, float]]:
    """After each epoch: the loss on `data`, the loss and the accuracy on `unseen`."""
    generator = Generator().manual_seed(seed)  # of the seed alone: all methods start alike
    model = network(generator)
    optimizer = method.make(model.parameters(), lr=lr)
    tenthing = LambdaLR(optimizer, lambda e: 0.1 ** ((e >= 0.6 * epochs) + (e >= 0.85 * epochs)))
    curve = []
    for _ in range(epochs):
        for index in torch.randperm(len(data), generator=generator).split(BATCH):
            images, labels = data[index]
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        tenthing.step()
        curve.append((measure(model, data)[0], *measure(model, unseen)))
    return curve


def rate(rung: int) -> float:
    """..., 0.01, 0.025, 0.1, 0.25, 1, ... with 1 at rung 0."""
    return float(f"{(1, 2.5)[rung % 2]}e{rung // 2}")


def search(
    method: Method, fitting: Data, validation: Data, epochs: int, reach: int, bar: tqdm
) -> tuple[float, list[float]]:
    """The learning rate of least validation loss, never at an edge of the rates tried; those."""
    # Loss, as a few hundred images cannot tell the accuracies of neighbouring rates apart.
    losses: dict[int, float] = {}
    waiting = list(range(method.centre - reach, method.centre + reach + 1))
    while waiting:
        for rung in waiting:
            loss = train(method, rate(rung), SEARCH_SEED, fitting, validation, epochs)[-1][1]
            losses[rung] = math.inf if math.isnan(loss) else loss
            bar.update()
        best, low, high = min(losses, key=losses.__getitem__), min(losses), max(losses)
        waiting = [low - 1] if best == low else [high + 1] if best == high else []
        bar.total += len(waiting)
    return rate(best), [rate(rung) for rung in sorted(losses)]


def compare(data: Data, seeds: int, epochs: int, reach: int) -> Results:
    generator = Generator().manual_seed(SPLIT_SEED)
    training, test = split(data, 0.7, generator)
    fitting, validation = split(training, 0.8, generator)
    results: Results = {}
    with tqdm(total=len(METHODS) * (2 * reach + 1 + seeds), unit="run") as bar:
        for name, method in METHODS.items():
            bar.set_description(name)
            lr, tried = search(method, fitting, validation, epochs, reach, bar)
            bar.write(f"{name}: lr {lr:g} has the least validation loss of {tried}")
            curves = []
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                curves.append(train(method, lr, seed, training, test, epochs))
                bar.update()
            results[name] = (lr, torch.tensor(curves))
    return results


def mean_and_error(samples: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the first dimension, and two standard errors of it."""
    return samples.mean(0), 2 * samples.std(0) / len(samples) ** 0.5


def table(results: Results) -> str:
    lines = [f"{'method':<8} {'lr':>7} {'test acc. %':>14} {'test loss':>17} {'train loss':>19}"]
    for name, (lr, curves) in results.items():
        (fit, loss, accuracy), (fit_error, loss_error, error) = mean_and_error(curves[:, -1])
        row = f"{name:<8} {lr:>7g} {accuracy:>7.2f} ± {error:.2f} {loss:>8.4f} ± {loss_error:.4f}"
        lines.append(f"{row} {fit:>9.5f} ± {fit_error:.5f}")
    return "\n".join(lines)


def draw(axes: Axes, results: Results, column: int, log: bool) -> None:
    for name, (lr, curves) in results.items():
        mean, error = mean_and_error(curves[..., column].log() if log else curves[..., column])
        band = torch.stack((mean - error, mean, mean + error))
        low, middle, high = band.exp() if log else band
        epochs, (*_, colour, line) = range(1, len(mean) + 1), METHODS[name]
        axes.plot(epochs, middle, line, color=colour, label=f"{name}, lr {lr:g}")
        axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def plot(results: Results) -> Figure:
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.06})
    draw(left, results, 2, log=False)
    draw(right, results, 0, log=True)
    seeds, epochs, _ = next(iter(results.values()))[1].shape
    # The climb from chance in the first quarter would flatten what is to be compared.
    lowest = min(curves.mean(0)[epochs // 4 :, 2].min() for _, curves in results.values())
    left.set(ylim=(math.floor(lowest) - 1, 100), ylabel="test accuracy, %")
    right.set(yscale="log", ylabel="training loss (geometric mean)")
    right.legend(frameon=False)
    title = f"Net of two convolutions on digits: mean of {seeds} seeds ± 2 standard errors"
    versions = f"cubegrad {cubegrad.__version__}, torch {torch.__version__}"
    figure.suptitle(f"{title}\n{versions}", fontsize=11)
    return figure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--seeds", type=int, default=5, help="reported runs of each method (%(default)s)")
    add("--epochs", type=int, default=15, help="epochs of each run (%(default)s)")
    add("--out", type=Path, default=Path("out/digits.png"), help="the plot (%(default)s)")
    add("--quick", action="store_true", help="at most 2 seeds and 4 epochs, in a few seconds")
    options = parser.parse_args()
    for name in ("seeds", "epochs"):
        if (value := getattr(options, name)) < 2:  # an error needs two runs, a line two points
            parser.error(f"--{name} {value} must be >= 2; use {parser.get_default(name)}")
    if options.out.suffix not in (".png", ".pdf", ".svg"):
        parser.error(f"--out {options.out} must end in .png, .pdf or .svg; use out/digits.png")
    if options.quick:
        options.seeds, options.epochs = min(options.seeds, 2), min(options.epochs, 4)
    return options


def main() -> None:
    options = arguments()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Sums split over threads round differently, and these are too small to gain from a split.
    torch.set_num_threads(1)
    results = compare(digits(), options.seeds, options.epochs, reach=1 if options.quick else 2)
    print(f"\n{table(results)}\n\n± is 2 standard errors of {options.seeds} seeds; less is noise.")
    plot(results).savefig(options.out, dpi=150)
    print(f"Plot: {options.out}")


if __name__ == "__main__":
    main()
