"""Records of runs that never took place, with numbers that are easy to check by hand."""

from cubegrad.study.records import Record, Settings

ABOUT = {
    "description": "a <net> & more",
    "metric": "accuracy",
    "higher_is_better": True,
    "unit": "%",
    "paper": "CIFAR10",
}
MACHINE = {
    "kind": "one GPU", "torch": "2.x", "python": "3.x", "cubegrad": "0", "commit": "abc",
    "date": "2026-01-02",
}  # fmt: skip


def toy_record(seed: int) -> Record:
    """With fractions that show a lost bit, and an epoch that diverged."""
    settings = Settings("toy", "cpu", 2, 16, "sgd", "flat", 2.5e-4, 0.0, seed)
    curve: dict[str, list[float | None]] = {"train_loss": [0.1 + 0.2, None], "loss": [1 / 3]}
    return Record(settings, "diverged", curve, 0.5, {"metric": "loss"}, {"torch": "x"})


def cifar10_record(
    method: str, lr: float, seed: int, accuracy: float | None, schedule: str = "flat"
) -> Record:
    """Three epochs up to this accuracy; None diverges."""
    settings = Settings("cifar10", "gpu", 3, 128, method, schedule, lr, 1e-4, seed)
    if accuracy is None:
        return Record(settings, "diverged", {"train_loss": [None]}, 60.0, ABOUT, MACHINE)
    curve: dict[str, list[float | None]] = {
        "train_loss": [2.0, 1.0, 0.5],
        "accuracy": [accuracy / 2, accuracy - 1, accuracy],
        "loss": [1.5, 1.0, 0.25],
    }
    return Record(settings, "finished", curve, 60.0, ABOUT, MACHINE)


CIFAR10_RECORDS = [
    cifar10_record("sgd", 0.1, 0, 90.0),
    cifar10_record("sgd", 0.25, 0, 92.0),
    cifar10_record("sgd", 0.5, 0, None),
    cifar10_record("sgd", 0.25, 1, 90.0),
    cifar10_record("sgd", 0.25, 2, 92.0),
    cifar10_record("madgrad", 1e-4, 0, 93.0),
    cifar10_record("madgrad", 2.5e-4, 0, 91.0),
    cifar10_record("madgrad", 1e-4, 1, 93.5),
    cifar10_record("madgrad", 1e-4, 2, None),
]
