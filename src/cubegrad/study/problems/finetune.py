"""Fine-tuning a language model, whole or by LoRA.

The model is a small RoBERTa, pretrained here on novels and fine-tuned on WikiText-2 or a text of
the user's; or a model of the user's, masked or causal. Updates, loss and evaluation are those of
`bookwiki`.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from tqdm import tqdm

from cubegrad.study import checkpoints, train
from cubegrad.study.data import next_token, plain_text, tokens
from cubegrad.study.data.masking import Blocks
from cubegrad.study.models import own_causal, own_folder, own_masked
from cubegrad.study.models.lora import add_low_rank
from cubegrad.study.problem import Preset, Problem, Setup, Split, StudyError, Task, optional
from cubegrad.study.problems import bookwiki
from cubegrad.study.records import Settings

RANK = 8
SEED = 0  # of the pretraining


@dataclass(frozen=True)
class Pretraining:
    """MADGRAD on the novels, with the options of the preset."""

    epochs: int
    batch: int
    schedule: str
    lr: float


# By the width of the network: options are part of a record's key, so they do not change.
PRETRAINING = {
    64: Pretraining(18, 32, "polynomial:450", 0.025),
    256: Pretraining(10, 256, "polynomial:1000", 0.01),
}


def pretrained(setup: Setup) -> dict[str, Any]:
    """The weights after pretraining, read from a file; if there is none, it is made."""
    options = {name: value for name, value in setup.preset.options.items() if name != "lora_rank"}
    recipe = PRETRAINING[options["width"]]
    path = _cached(setup.data, options, recipe)
    state = checkpoints.load(path)
    if state is None or state["epoch"] < recipe.epochs:
        preset = Preset(recipe.epochs, recipe.batch, recipe.schedule, options=options)
        state = _pretrain(setup, preset, recipe.lr, path)
    weights: dict[str, Any] = state["model"]
    return weights


def _pretrain(setup: Setup, preset: Preset, lr: float, path: Path) -> dict[str, Any]:
    """An ordinary run of `bookwiki`, whose checkpoint is the file."""
    problem = replace(bookwiki.problem(), name="novels", presets={"novels": preset})
    settings = Settings(
        "novels",
        "novels",
        preset.epochs,
        preset.batch,
        "madgrad",
        preset.schedule,
        lr,
        decay=0.0,
        seed=SEED,
        device=setup.device.type,
    )
    with tqdm(desc="pretraining on novels", total=preset.epochs, unit=" epochs") as bar:

        def tick() -> None:
            bar.update()

        train.run(problem, settings, train.Place(setup.data, save_every=0), path, tick)
    state = checkpoints.load(path)
    assert state is not None
    # Readable without a GPU too, and a quarter of the size.
    weights = {name: value.cpu() for name, value in state["model"].items()}
    state |= {"model": weights, "optimizer": {}}
    checkpoints.save(path, state)
    return state


def _cached(data: Path, options: dict[str, Any], recipe: Pretraining) -> Path:
    """Named by all that determines the weights; in the user's cache if `data` is read-only."""
    texts = tokens.checksum(_novels(data), options["vocabulary"], options["length"])
    about = json.dumps([texts, options, asdict(recipe), SEED], sort_keys=True)
    name = f"cubegrad-pretrained-{hashlib.sha256(about.encode()).hexdigest()[:20]}.pt"
    beside = data / name
    return beside if beside.exists() or os.access(data, os.W_OK) else tokens.cache_folder() / name


def _novels(data: Path) -> plain_text.Texts:
    if not (data / "novels").is_dir():
        raise StudyError(
            f"there is no folder {data / 'novels'}, and the model is pretrained on it: put .txt or "
            ".txt.xz files there (docs/problems/finetune.md)"
        )
    return plain_text.find(data, "novels")


@lru_cache(maxsize=1)
def parts(
    data: Path, novels: tuple[int, int] | None, length: int, hold_out: bool, device: torch.device
) -> tuple[dict[Split, Blocks], int]:
    """The text on the device, in the tokens of the novels or of the user's model; their number."""
    folder, blocks = data / "model", Blocks
    texts = plain_text.find(data, "text" if novels is None else "wikitext-2")
    if novels is not None:
        corpus = tokens.corpus(_novels(data), *novels)
        tokenizer = optional("tokenizers").Tokenizer.from_str(corpus.tokenizer)
        made, vocabulary = tokens.encoded(tokenizer, texts, length), corpus.vocabulary
    elif own_folder.kind(folder) == "causal":
        own = own_causal.tokenizer(folder)
        made, vocabulary = next_token.encoded(own, texts, length), own.size
        blocks = next_token.FullBlocks
    else:
        tokenizer, special, count = own_masked.tokenizer(folder)
        made, vocabulary = tokens.encoded(tokenizer, texts, length), len(special) + count
    if not hold_out and not texts.has_parts:
        made["train"] = tokens.joined(made["train"], made["valid"])
    return {part: blocks.of(some, device) for part, some in made.items()}, vocabulary


def _own_model(folder: Path, length: int) -> nn.Module:
    if own_folder.kind(folder) == "causal":
        return own_causal.model(folder, own_causal.tokenizer(folder).size, length)
    _, special, count = own_masked.tokenizer(folder)
    return own_masked.model(folder, special, count, length)


def build(setup: Setup) -> Task:
    options = setup.preset.options
    own, length = "width" not in options, options["length"]
    novels = None if own else (options["vocabulary"], length)
    sets, vocabulary = parts(setup.data, novels, length, setup.hold_out, setup.device)
    model: nn.Module
    if own:
        model = _own_model(setup.data / "model", length)
    else:
        model = bookwiki.network(dict(options), vocabulary)
        model.load_state_dict(pretrained(setup))
    start = checksum(model.state_dict())
    if "lora_rank" in options:
        add_low_rank(model, options["lora_rank"], Generator().manual_seed(setup.seed))
    return replace(bookwiki.task(setup, sets, vocabulary, model.to(setup.device)), start=start)


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Of a thousand elements of each tensor or so, which tell one pretraining from another."""
    found = hashlib.sha256()
    for name, tensor in weights.items():
        some = tensor.flatten()[:: max(tensor.numel() // 1000, 1)]
        found.update(name.encode() + some.double().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def check_data(setup: Setup) -> None:
    """Reads the text, and pretrains the model for the runs."""
    optional("transformers")
    if "width" not in setup.preset.options:
        folder = setup.data / "model"
        (own_causal if own_folder.kind(folder) == "causal" else own_masked).tokenizer(folder)
        plain_text.find(setup.data, "text")
        return
    plain_text.find(setup.data, "wikitext-2")
    pretrained(setup)


METHODS = ("madgrad", "madgrad-auto", "adamw")
# Around the best at `cpu` and `gpu`; AdaGrad's at `gpu` and the others are guesses, which widen.
RATES = {
    "cpu": {"madgrad": (1e-2, 5e-2), "adamw": (5e-3, 2.5e-2), "adagrad": (1e-2, 5e-2)},
    "cpu-lora": {"madgrad": (5e-3, 2.5e-2), "adamw": (5e-3, 2.5e-2)},
    "gpu": {
        "madgrad": (5e-3, 2.5e-2),
        "mirror-madgrad": (2.5e-2, 1e-1),
        "adamw": (1e-3, 5e-3),
        "adam": (1e-3, 5e-3),
        "sgd": (5e-1, 2.5),
        "adagrad": (2.5e-3, 1e-2),  # with 0.05 or more it forgets its pretraining
    },
    "gpu-lora": {"madgrad": (2.5e-3, 1e-2), "adamw": (1e-3, 5e-3)},
    "own": {"madgrad": (1e-4, 5e-4), "adamw": (2.5e-5, 1e-4)},
    "own-lora": {"madgrad": (1e-3, 5e-3), "adamw": (2.5e-4, 1e-3)},
}
FACTORS = {"cpu": "and 19,456 in LoRA factors", "gpu": "and 151,552 in LoRA factors"}


def _presets() -> dict[str, Preset]:
    whole: dict[str, Preset] = {}
    for name, epochs, schedule in (("cpu", 4, "polynomial:20"), ("gpu", 2, "polynomial:40")):
        base = bookwiki.problem().presets[name]
        options = {**base.options, "corpus": "novels"}
        whole[name] = replace(base, epochs=epochs, schedule=schedule, options=options)
    names = ("length", "updates", "test_blocks", "clip")
    whole["own"] = replace(
        whole["gpu"],
        batch=32,
        size="your model in DATA/model, your text in DATA/text",
        # Fewer blocks than an update has: no CUDA graph, which few models allow.
        options={name: whole["gpu"].options[name] for name in names} | {"at_once": 16},
    )
    by_lora = {
        f"{name}-lora": replace(
            preset,
            size=f"{preset.size}, {FACTORS.get(name, 'LoRA')}",
            options={**preset.options, "lora_rank": RANK},
        )
        for name, preset in whole.items()
    }
    return {
        name: replace(preset, methods=METHODS, decays=(0.0, 1e-5), lrs=RATES[name])
        for name, preset in (whole | by_lora).items()
    }


def problem() -> Problem:
    return replace(
        bookwiki.problem(),
        name="finetune",
        description="a RoBERTa trained on novels, fine-tuned on WikiText-2",
        build=build,
        presets=_presets(),
        data="plain text: novels to pretrain on, WikiText-2 or your own; or a model of your own",
        paper="",
        check_data=check_data,
    )
