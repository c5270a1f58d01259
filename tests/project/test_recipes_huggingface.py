"""The recipes for the libraries of Hugging Face run as a user starts them, without a network.

They run in this process, since importing the libraries takes longer than training.
"""

import copy
import math
import os
import re
import runpy
import shutil
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cubegrad import MADGRAD, MADGRADW, estimated_lr

os.environ["HF_HUB_OFFLINE"] = "1"  # read when a library is imported
EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = {  # the libraries that each of them imports
    "transformers_trainer.py": ["transformers", "accelerate"],
    "trl_sft.py": ["trl", "datasets"],
    "accelerate_loop.py": ["accelerate"],
    "peft_lora.py": ["peft", "transformers"],
    "diffusers_ema.py": ["diffusers"],
}

pytestmark = [
    pytest.mark.training,
    # torch's, of the DataLoader that the Trainer makes for a GPU if nobody says otherwise
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]
fixed_and_auto = pytest.mark.parametrize("options", [[], ["--auto"]], ids=["fixed", "auto"])


@pytest.fixture
def start(monkeypatch):
    """Start a recipe, with options or with main=False: then nothing is trained yet."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")  # bits are compared, which a GPU does not promise

    def recipe(name: str, *options: str, main: bool = True) -> dict[str, Any]:
        for library in RECIPES[name]:
            pytest.importorskip(library)
        monkeypatch.setattr(sys, "argv", [name, *options])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__" if main else "recipe")

    return recipe


@pytest.fixture
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


def flat(params: Iterable[Tensor]) -> Tensor:
    return torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 60


@fixed_and_auto
def test_trainer_resumes_mid_epoch_with_the_same_bits(start, options, tmp_path, capsys):
    options = ["--folder", str(tmp_path), *options]
    start("transformers_trainer.py", *options)
    first, last = losses(capsys.readouterr().out)
    assert last < first / 4  # measured: 3.0 and 0.14, 3.2 and 0.15
    weights = tmp_path / "checkpoint-160" / "model.safetensors"
    unbroken = weights.read_bytes()
    for later in (140, 160):
        shutil.rmtree(tmp_path / f"checkpoint-{later}")
    start("transformers_trainer.py", *options, "--resume")  # from step 70; an epoch has 32
    assert weights.read_bytes() == unbroken


def test_trainer_takes_an_optimizer_or_its_class(start, tmp_path):
    train = start("transformers_trainer.py", main=False)["train"]
    models = (train(str(tmp_path), by_class=way).model for way in (False, True))
    given, built = (flat(model.parameters()) for model in models)
    assert torch.equal(given, built)


def test_trainer_logs_the_estimate_beside_the_factor(start, tmp_path):
    train = start("transformers_trainer.py", main=False)["train"]
    trainer = train(str(tmp_path), auto=True, by_class=True)
    logged = [entry for entry in trainer.state.log_history if "learning_rate" in entry]
    assert [entry["learning_rate"] for entry in logged] == pytest.approx(
        [(160 - step + 1) / 140 if step > 20 else 0.95 for step in range(20, 161, 20)]
    )  # a warm-up of 20 steps to a factor of 1, then down to 0
    assert all(0 < entry["estimated_lr"] < 1 for entry in logged)
    assert logged[-1]["estimated_lr"] == estimated_lr(trainer)


def small_trainer(start: Any, folder: Path, optimizer: Any, **arguments: Any) -> Any:
    """The recipe's Trainer, with a smaller model, for one epoch of 16 steps."""
    names = start("transformers_trainer.py", main=False)
    names["set_seed"](0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = names["LlamaForCausalLM"](names["LlamaConfig"](**sizes, num_attention_heads=2))
    arguments |= {"num_train_epochs": 1, "save_strategy": "no"}
    args = names["TrainingArguments"](str(folder), **arguments)
    pair = optimizer(model.parameters()), None
    return names["Trainer"](model, args, train_dataset=names["counting"](128), optimizers=pair)


@pytest.mark.filterwarnings("ignore:AdamW.s beta2:UserWarning")
def test_trainer_passes_madgradw_what_it_passes_adamw(start, tmp_path):
    """With the same arguments and the same batches both learn, and the groups are alike."""
    names = start("transformers_trainer.py", main=False)
    options = {"lr": 4e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    groups = []
    for cls in (torch.optim.AdamW, MADGRADW):
        trainer = small_trainer(start, tmp_path, torch.optim.AdamW, logging_steps=4)
        chosen = {"optimizer_cls_and_kwargs": (cls, options)}
        data = names["counting"](128)
        trainer = names["Trainer"](trainer.model, trainer.args, train_dataset=data, **chosen)
        trainer.train()
        assert trainer.optimizer.optimizer.__class__ is cls
        groups.append([len(group["params"]) for group in trainer.optimizer.param_groups])
        seen = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert seen[-1] < 0.95 * seen[0]  # measured: 0.82 and 0.87
    assert groups[0] == groups[1]


def test_trainer_accumulates_to_the_weights_of_a_large_batch(start, tmp_path):
    weights = []
    for batch, accumulate in ((8, 1), (2, 4), (2, 1)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate}
        trainer = small_trainer(start, tmp_path, lambda params: MADGRAD(params, lr=4e-3), **sizes)
        trainer.train()
        weights.append(flat(trainer.model.parameters()))
    large, parts, small = weights
    # Sums of float32 in another order: 1e-8 was measured, and 0.14 without accumulation.
    assert (parts - large).abs().max() < 1e-5
    assert (small - large).abs().max() > 1e-2


def test_trainer_with_gradient_release_is_refused(start, tmp_path):
    def released(params: Iterable[nn.Parameter]) -> MADGRAD:
        optimizer = MADGRAD(params, lr=4e-3)
        optimizer.release_gradients()
        return optimizer

    trainer = small_trainer(start, tmp_path, released, max_grad_norm=0)
    with pytest.raises(RuntimeError, match="was changed after backward"):
        trainer.train()


@fixed_and_auto
def test_sft(start, options, tmp_path, capsys):
    start("trl_sft.py", "--folder", str(tmp_path), *options)
    first, last = losses(capsys.readouterr().out)
    assert last < first / 2  # measured: 2.3 and 0.47, 2.4 and 0.48


@fixed_and_auto
def test_accelerate_steps_the_schedule_with_the_optimizer(start, options, capsys):
    start("accelerate_loop.py", *options)
    output = capsys.readouterr().out
    first, *_, last = losses(output)
    assert last < first / 4  # measured: 0.56 and 0.040, 0.55 and 0.043
    printed = re.findall(r"epoch (\d+): .*then lr (\S+)", output)
    rates = {int(epoch): float(rate) for epoch, rate in printed}
    assert rates[20] == 0
    if not options:
        cosine = {epoch: 1e-2 * (1 + math.cos(math.pi * epoch / 20)) / 2 for epoch in rates}
        assert rates == pytest.approx(cosine, rel=1e-3)  # as many digits are printed


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("auto", [False, True])
def test_accelerate_accumulates_to_the_weights_of_a_large_batch(start, auto):
    train = start("accelerate_loop.py", main=False)["train"]
    large, parts, small = (
        flat(train(auto, batch, accumulate).parameters())
        for batch, accumulate in ((64, 1), (16, 4), (16, 1))
    )
    # The sums of a batch differ in their order only, by 1e-16; after 160 steps the weights differed
    # by 7e-16. Runs that do not accumulate differ by more than 0.1.
    assert (parts - large).abs().max() < 1e-10
    assert (small - large).abs().max() > 1e-3


@pytest.mark.parametrize("lr", [1e-2, "auto"])
def test_accelerate_resumes_with_the_same_bits(start, lr, tmp_path):
    names = start("accelerate_loop.py", main=False)
    weights = []
    for epochs in (range(4), range(2, 4)):
        names["set_seed"](0)
        accelerator = names["Accelerator"](gradient_accumulation_steps=4)
        model = nn.Linear(2, 1)
        optimizer = MADGRAD(model.parameters(), lr=lr)
        scheduler = names["CosineAnnealingLR"](optimizer, T_max=64)
        loader = names["DataLoader"](names["sines"](128), 8, shuffle=True)
        run = accelerator.prepare(model, optimizer, loader, scheduler)
        for epoch in epochs:
            if epoch == 2:
                (accelerator.load_state if epochs.start else accelerator.save_state)(str(tmp_path))
            one_epoch(accelerator, *run)
        weights.append(flat(model.parameters()))
    assert torch.equal(*weights)


def one_epoch(accelerator, model, optimizer, loader, scheduler):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@fixed_and_auto
def test_lora_goes_on_from_a_saved_adapter(start, options, tmp_path, capsys):
    names = start("peft_lora.py", "--folder", str(tmp_path), *options)
    before, base, first, last = losses(capsys.readouterr().out)
    assert base < before / 4  # measured: 3.5 and 0.087
    assert last < first / 4  # measured: 6.8 and 0.012, 6.8 and 0.019
    model, optimizer = names["model"], names["optimizer"]
    without_adapter = copy.deepcopy(model).unload()
    loaded = names["load"](without_adapter, tmp_path, lr="auto" if options else 1e-2)
    saved = flat(model.parameters())
    tokens = torch.arange(16)[None]
    for net, its_optimizer in ((model, optimizer), loaded):
        its_optimizer.param_groups[0]["lr"] = 1.0 if options else 1e-2  # the schedule ended at 0
        for _ in range(3):
            net(input_ids=tokens, labels=tokens).loss.backward()
            its_optimizer.step()
            its_optimizer.zero_grad()
    assert torch.equal(flat(loaded[0].parameters()), flat(model.parameters()))
    assert not torch.equal(flat(model.parameters()), saved)


def test_adalora_prunes_inside_edit_weights(start):
    peft = pytest.importorskip("peft")
    names = start("peft_lora.py", main=False)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    returned = {}
    for edits in (False, True):
        torch.manual_seed(0)
        base = names["LlamaForCausalLM"](names["LlamaConfig"](**sizes, num_attention_heads=2))
        ranks = {"init_r": 8, "target_r": 3, "tinit": 5, "tfinal": 15, "deltaT": 5}
        ranks |= {"total_step": 45, "target_modules": "all-linear"}
        model = peft.get_peft_model(base, peft.AdaLoraConfig(**ranks))
        optimizer = MADGRAD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        values = [p for name, p in model.named_parameters() if "lora_E" in name]
        tokens = (torch.randint(32, (32, 1)) + 4 * torch.arange(16)) % 32
        for step in range(45):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            before = flat(values)
            with optimizer.edit_weights(keep_momentum=False) if edits else nullcontext():
                model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
        pruned = flat(values) == 0
        returned[edits] = before[pruned].abs().mean()
    # How far the last step had moved what is pruned; measured: 0.0036 and 0.0001.
    assert returned[True] < returned[False] / 5


def test_loraplus_takes_a_fixed_lr(start):
    names = start("peft_lora.py", main=False)
    create = pytest.importorskip("peft.optimizers").create_loraplus_optimizer
    model = nn.Sequential(nn.Linear(4, 4))
    model = names["get_peft_model"](model, names["LoraConfig"](target_modules=["0"]))
    optimizer = create(model, MADGRAD, lr=2.5e-3, loraplus_lr_ratio=8)
    rates = [group["lr"] for group in optimizer.param_groups if group["params"]]
    assert rates == [2.5e-3, 2e-2]
    with pytest.raises(TypeError, match="'auto' times a ratio, give that group the ratio"):
        create(model, MADGRAD, lr="auto", loraplus_lr_ratio=8)


@pytest.mark.parametrize("options", [[], ["--auto", "--adopt", "50"]], ids=["fixed", "auto, adopt"])
def test_diffusion(start, options, capsys):
    start("diffusers_ema.py", *options)
    first, *_, average = losses(capsys.readouterr().out)
    assert average < first / 4  # measured: 0.97 and 0.053, 0.97 and 0.074


def test_an_average_copied_into_the_model_stays_if_the_optimizer_knows(start):
    train = start("diffusers_ema.py", main=False)["train"]
    model, optimizer, ema = train(auto=False, steps=40)
    weights, average = flat(model.parameters()), flat(ema.shadow_params)
    assert not torch.equal(weights, average)  # swapped out again after its evaluation
    undone = []
    for edit in (None, {}, {"keep_momentum": False}):
        net, its_optimizer = copy.deepcopy((model, optimizer))
        with nullcontext() if edit is None else its_optimizer.edit_weights(**edit):
            ema.copy_to(net.parameters())
        after = flat_after_steps_without_gradient(net, its_optimizer)
        undone.append((after - average).norm() / (weights - average).norm())
    unaware, with_momentum, without = undone  # measured: 2.5, 1.5 and less than 0.0001
    assert without < 0.01 < with_momentum < unaware
    assert torch.equal(flat(ema.shadow_params), average)


def flat_after_steps_without_gradient(model: nn.Module, optimizer: MADGRAD) -> Tensor:
    optimizer.param_groups[0]["lr"] = 1e-2  # the schedule has ended at 0
    for _ in range(30):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
    return flat(model.parameters())
