"""The recipes for PyTorch and the libraries around it do what docs/recipes.md says.

They run in this process, since importing the libraries takes longer than training.
"""

import csv
import importlib
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import cubegrad

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"

pytestmark = pytest.mark.training


class StoppedError(Exception):
    """Stands for a job that is killed."""


@pytest.fixture
def recipe(monkeypatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def on_cpu(monkeypatch) -> None:
    """Bits are compared, and kernels of a GPU may add in another order each time."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@contextmanager
def stopped_in_step(step: int) -> Iterator[None]:
    steps = itertools.count(1)

    def stop(*_: Any) -> None:
        if next(steps) == step:
            raise StoppedError

    hook = register_optimizer_step_post_hook(stop)
    try:
        with pytest.raises(StoppedError):
            yield
    finally:
        hook.remove()


@contextmanager
def steps_recorded(*names: str) -> Iterator[list[tuple[Any, ...]]]:
    """The options of the first group in each step."""
    found: list[tuple[Any, ...]] = []

    def record(optimizer: Any, *_: Any) -> None:
        found.append(tuple(float(optimizer.param_groups[0][name]) for name in names))

    hook = register_optimizer_step_post_hook(record)
    try:
        yield found
    finally:
        hook.remove()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def accuracy(output: str) -> float:
    return float(re.findall(r"accuracy ([\d.]+)%", output)[-1])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_pytorch_resumes_bit_for_bit(recipe, tmp_path, monkeypatch, capsys, dtype):
    monkeypatch.setattr(torch, "bfloat16", dtype)  # float16: the way of a GPU, with a GradScaler
    main = recipe("plain_pytorch").main
    unbroken = main(tmp_path / "unbroken.pt", epochs=6)
    with stopped_in_step(100):  # in epoch 4
        main(tmp_path / "stopped.pt", epochs=6)
    resumed = main(tmp_path / "stopped.pt", epochs=6)
    assert equal(unbroken, resumed)
    assert bool(torch.load(tmp_path / "stopped.pt")["scaler"]) == (dtype == torch.float16)
    output = capsys.readouterr().out
    assert "3 epochs from the checkpoint, 3 trained" in output
    assert accuracy(output) > 90  # 97.3 to 99.2 with 5 seeds
    assert equal(main(tmp_path / "stopped.pt", epochs=6), resumed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_plain_pytorch_in_float16(recipe, tmp_path, capsys):
    recipe("plain_pytorch").main(tmp_path / "state.pt")
    assert accuracy(capsys.readouterr().out) > 90


@pytest.mark.usefixtures("on_cpu")
# Lightning's own: the folder has the log already, and later the checkpoints to resume from;
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
# it asks in a way that torch 2.13 has deprecated; and it would like more processes to load data.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_lightning_cycles_logs_and_resumes_bit_for_bit(recipe, tmp_path):
    pytest.importorskip("lightning")
    main = recipe("lightning_module").main
    with steps_recorded("lr", "momentum", "estimated_lr") as steps:
        unbroken = main(tmp_path / "unbroken", epochs=4)
    with stopped_in_step(40):  # in epoch 3
        main(tmp_path / "stopped", epochs=4)
    with steps_recorded("lr") as resumed_steps:
        assert equal(main(tmp_path / "stopped", epochs=4), unbroken)
    factors, momenta, estimates = zip(*steps, strict=True)
    assert len(steps) == 4 * 1024 / 32 / 2  # two batches a step
    assert len(resumed_steps) == len(steps) / 2
    assert max(factors) == pytest.approx(1.0, abs=0.01)
    assert min(momenta) == pytest.approx(0.85, abs=0.001)
    assert max(momenta) == momenta[0] == 0.95
    before_each_16th = pytest.approx(estimates[14::16])  # logged in float32
    assert logged(tmp_path / "unbroken", "estimated_lr") == before_each_16th
    last_loss = logged(tmp_path / "unbroken", "loss")[-1]
    assert last_loss < 0.5  # 0.09 to 0.15 with 3 seeds; ln 2 = 0.69 at first


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.parametrize("lr", ["0.001", "auto"])
def test_lightnings_command_line_takes_the_yaml_of_the_page(recipe, tmp_path, monkeypatch, lr):
    pytest.importorskip("jsonargparse")
    pytest.importorskip("typeshed_client")
    cli = pytest.importorskip("lightning.pytorch.cli")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of names that Lightning uses
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    path = tmp_path / "config.yaml"
    path.write_text(shown, encoding="utf-8")

    class Circle(recipe("lightning_module").Circle):
        configure_optimizers = cli.LightningModule.configure_optimizers  # left to the YAML

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    given = [f"--config={path}", f"--optimizer.lr={lr}", "--seed_everything=false"]
    trainer = {"max_epochs": "1", "logger": "false", "enable_checkpointing": "false"}
    given += [f"--trainer.{name}={value}" for name, value in trainer.items()]
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", *given])
    with steps_recorded("lr", "weight_decay") as steps:
        run = cli.LightningCLI(Circle, save_config_callback=None)
    assert type(run.trainer.optimizers[0]) is cubegrad.MADGRADW
    assert steps[0] == (1.0 if lr == "auto" else 0.001, 0.1)
    assert len(steps) == 1024 / 32
    assert all(param.isfinite().all() for param in run.model.parameters())


def logged(folder: Path, name: str) -> tuple[float, ...]:
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return tuple(float(row[name]) for row in csv.DictReader(file))


# dcp warns that it saves for one process; torchtitan imports parts of torch that are deprecated.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_torchtitan_learns_and_its_containers_resume(recipe, tmp_path):
    pytest.importorskip("torchtitan")
    module = recipe("torchtitan_optimizer")
    assert module.main() < 0.5  # 0.002 to 0.004 with 5 seeds; ln 64 = 4.2 at first
    config = module.Optimizer(lr=1e-2, beta1=0.8, weight_decay=0.01)
    data = torch.randn(6, 16, 8, generator=torch.Generator().manual_seed(0))

    def start() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizers = module.build_madgrad([model], config, "parallel_dims")
        schedule = module.JobConfig().lr_scheduler
        schedule.warmup_steps = 2
        return model, optimizers, module.spec.build_lr_schedulers_fn(optimizers, schedule, 6)

    def train(model: nn.Module, optimizers: Any, schedulers: Any, batches: Tensor) -> nn.Module:
        for batch in batches:
            optimizers.zero_grad()
            model(batch).square().mean().backward()
            optimizers.step()
            schedulers.step()
        return model

    def parts(model: nn.Module, optimizers: Any, schedulers: Any) -> dict[str, Any]:
        return {"model": model, "optimizer": optimizers, "lr_scheduler": schedulers}

    unbroken, stopped, resumed = start(), start(), start()
    (optimizer,) = unbroken[1]
    assert isinstance(optimizer, cubegrad.MADGRAD)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["decoupled_weight_decay"]) == (0.8, True)
    train(*unbroken, data)
    train(*stopped, data[:3])
    dcp.save(parts(*stopped), checkpoint_id=tmp_path)
    dcp.load(parts(*resumed), checkpoint_id=tmp_path)
    assert equal(train(*resumed, data[3:]), unbroken[0])


def test_timm(recipe):
    timm = pytest.importorskip("timm")
    module = recipe("timm_train")
    model = timm.create_model("test_resnet", num_classes=2, in_chans=1)
    optimizer = module.create_optimizer_v2(model, "cubegrad", lr=0.1, weight_decay=0.2)
    assert type(optimizer) is cubegrad.MADGRAD
    decays = {p.ndim > 1: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {True: 0.2, False: 0.0}  # timm's groups
    assert module.main() < 0.5  # 0.03 to 0.1 with 3 seeds; ln 2 = 0.69 at first


def test_what_lookahead_does_lasts_in_the_recipe_alone(recipe):
    """timm's own is undone: in the end the weights are where MADGRAD alone takes them."""
    pytest.importorskip("timm")
    module = recipe("timm_train")
    alone, undone, lasting = (
        ending(wrap) for wrap in (lambda base: base, module.Lookahead, module.MadgradLookahead)
    )
    assert undone == pytest.approx(alone, rel=1e-3)
    assert lasting == pytest.approx(alone * 0.57, rel=0.05)  # a step back after every six


def ending(wrap: Callable[[Any], Any]) -> float:
    """The weight after 12 steps with a gradient and 300 in which it comes to rest."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = wrap(cubegrad.MADGRAD([weight], lr=0.1))
    for step in range(312):
        weight.grad = torch.full((1,), float(step < 12))
        optimizer.step()
    return weight.item()


@pytest.mark.processes
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_resumes(stage, tmp_path):
    """On two processes; the losses are printed to nine digits."""
    pytest.importorskip("deepspeed")
    script = [str(EXAMPLES / "deepspeed_zero.py"), "--stage", str(stage), "--folder", str(tmp_path)]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def losses() -> dict[tuple[str, str], float]:
        done = subprocess.run(
            [sys.executable, "-m", *launcher, *script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"rank (\d), step (\d+): loss ([\d.]+)", done.stdout)
        return {(rank, step): float(loss) for rank, step, loss in found}

    unbroken = losses()
    assert len(unbroken) == 10
    assert unbroken["0", "100"] < 0.4  # 0.69 at first, 0.08 then
    (tmp_path / "latest").write_text("global_step60")  # as if it had been stopped after step 60
    resumed = losses()
    assert resumed == {key: loss for key, loss in unbroken.items() if int(key[1]) > 60}
    assert len(resumed) == 4
