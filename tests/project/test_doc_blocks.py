"""The Python blocks of README.md and of the pages for users run as they are shown.

A block runs after those above it on its page, with the names that every reader has: a model, a
loss_fn, data.
"""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cubegrad import MADGRAD

ROOT = Path(__file__).parents[2]
PAGES = {  # how many blocks they have
    "README.md": 7,
    "docs/auto.md": 1,
    "docs/gradient_release.md": 1,
    "docs/learning_rate.md": 2,
    "docs/memory.md": 5,
    "docs/one_gpu.md": 1,
    "docs/recipes_huggingface.md": 7,
}
NOT_RUN = {  # part of a block -> why; such a block is only compiled
    "fully_shard(": "needs a process group; tests/optim/test_distributed.py shards so",
    'torch.device("cuda")': "needs a GPU; tests/project/test_one_gpu.py runs the example",
    "SFTTrainer(": "needs a language model; tests/project/test_recipes_huggingface.py has one",
}
HUGGING_FACE = ("accelerate", "diffusers", "peft", "transformers")
SIGNATURE = "MADGRAD(params, lr=1e-2, momentum"  # documentation, not code: compared below

OLD_GROUP = {  # of the package madgrad, over the model's 4 parameters
    "lr": 1e-2,
    "eps": 1e-6,
    "momentum": 0.9,
    "weight_decay": 0,
    "decouple_decay": False,
    "params": [0, 1, 2, 3],
}


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)


def names_of_a_reader() -> dict[str, Any]:
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 64), torch.randint(10, (16,))
    return {
        "torch": torch,
        "model": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        "loss_fn": nn.CrossEntropyLoss(),
        "inputs": inputs,
        "targets": targets,
        "batches": [(inputs, targets)] * 3,
    }


def run(page: str) -> None:
    names: dict[str, Any] = {}
    for index, block in enumerate(blocks(page)):
        if block.startswith(SIGNATURE):
            continue
        code = compile(block, f"{page}, block {index}", "exec")
        if not any(part in block for part in NOT_RUN):
            names.update(names_of_a_reader())
            exec(code, names)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    assert len(blocks(page)) == PAGES[page]
    if any("cubegrad.optax" in block for block in blocks(page)):
        pytest.importorskip("optax")
    for library in HUGGING_FACE if page == "docs/recipes_huggingface.md" else ():
        pytest.importorskip(library)
    torch.save({"optimizer": {"state": {}, "param_groups": [OLD_GROUP]}}, tmp_path / "old.pt")
    monkeypatch.chdir(tmp_path)
    if not torch.cuda.is_available() and any("autocast" in block for block in blocks(page)):
        autocast = torch.autocast
        monkeypatch.setattr(torch, "autocast", lambda _, dtype: autocast("cpu", dtype))
    run(page)


def test_every_reason_is_needed():
    everything = "".join(block for page in PAGES for block in blocks(page))
    assert all(part in everything for part in [*NOT_RUN, SIGNATURE])


def test_the_signature_is_that_of_the_class():
    (shown,) = (block for block in blocks("README.md") if block.startswith(SIGNATURE))
    arguments = ast.parse(f"def {shown.strip()}: ...").body[0].args
    own = inspect.signature(MADGRAD).parameters.values()
    documented = [a.arg for a in arguments.args], [a.arg for a in arguments.kwonlyargs]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert documented == tuple([p.name for p in own if p.kind is kind] for kind in kinds)
    values = [ast.literal_eval(v) for v in (*arguments.defaults, *arguments.kw_defaults)]
    assert values == [p.default for p in own if p.default is not p.empty]


def test_a_broken_block_fails(monkeypatch):
    broken = "optimizer = torch.optim.SGD(parameters, lr=0.1)\n"
    monkeypatch.setitem(globals(), "blocks", lambda _: [broken])
    with pytest.raises(NameError, match="'parameters' is not defined"):
        run("README.md")
