"""The Python blocks of README.md and of the pages for users run as they are shown.

A block runs after those above it on its page, with the names that every reader has: a model, a
loss_fn, data.
"""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cubegrad
from cubegrad import cautions

ROOT = Path(__file__).parents[2]
PAGES = {  # how many blocks they have
    "README.md": 2,
    "docs/algorithm.md": 1,
    "docs/auto.md": 1,
    "docs/coming_from.md": 1,
    "docs/distributed.md": 2,
    "docs/gradient_release.md": 1,
    "docs/index.md": 1,
    "docs/jax.md": 7,
    "docs/learning_rate.md": 2,
    "docs/madgradw.md": 4,
    "docs/memory.md": 5,
    "docs/one_gpu.md": 1,
    "docs/param_groups.md": 4,
    "docs/recipes.md": 8,
    "docs/recipes_huggingface.md": 8,
    "docs/study.md": 1,
    "docs/using.md": 3,
}
ELSEWHERE = {  # pages whose blocks other tests run
    "docs/editing_weights.md": "tests/optim/test_edit_docs.py",
    "docs/own_problem.md": "tests/study/test_cli.py",
}
NOT_RUN = {  # part of a block -> why; such a block is only compiled
    "fully_shard(": "needs a process group; tests/optim/test_distributed.py shards so",
    "dcp.save(": "needs a process group; tests/optim/test_distributed.py saves so",
    'torch.device("cuda")': "needs a GPU; tests/project/test_one_gpu.py runs the example",
    "from timm": "not in the environment; tests/project/test_recipes.py runs the example",
    "from torchtitan": "takes 8 s to import; tests/project/test_recipes.py runs the example",
    "import deepspeed": "not in the environment; tests/project/test_recipes.py runs the example",
    "import wandb": "not in the environment; tests/study/test_export.py runs it over a stand-in",
    "SFTTrainer(": "needs a language model; tests/project/test_recipes_huggingface.py has one",
}
HUGGING_FACE = ("accelerate", "diffusers", "peft", "transformers")
SIGNATURES = {  # documentation, not code: compared below
    "MADGRAD(params, lr=1e-2, momentum": "docs/using.md",
    "madgrad(learning_rate=1e-2, momentum": "docs/jax.md",
}

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
        "params": {"weight": np.zeros((64, 64), np.float32)},  # in JAX
    }


def run(page: str) -> None:
    names: dict[str, Any] = {}
    for index, block in enumerate(blocks(page)):
        if block.startswith(tuple(SIGNATURES)):
            continue
        code = compile(block, f"{page}, block {index}", "exec")
        if not any(part in block for part in NOT_RUN):
            names.update(names_of_a_reader())
            exec(code, names)


@pytest.mark.filterwarnings("error:weight_decay=.* is an L2 term")
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    assert len(blocks(page)) == PAGES[page]
    if any("cubegrad.optax" in block for block in blocks(page)):
        pytest.importorskip("optax")
    for library in HUGGING_FACE if page == "docs/recipes_huggingface.md" else ():
        pytest.importorskip(library)
    torch.save({"optimizer": {"state": {}, "param_groups": [OLD_GROUP]}}, tmp_path / "old.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cautions, "_has_warned_of_decay", False)
    if not torch.cuda.is_available() and any("autocast" in block for block in blocks(page)):
        autocast = torch.autocast
        monkeypatch.setattr(torch, "autocast", lambda _, dtype: autocast("cpu", dtype))
    run(page)


def test_every_reason_is_needed():
    everything = "".join(block for page in PAGES for block in blocks(page))
    assert all(part in everything for part in [*NOT_RUN, *SIGNATURES])


def test_every_page_with_blocks_is_run():
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert {page for page in pages if blocks(page)} == {*PAGES, *ELSEWHERE} - {"README.md"}
    assert all(page in (ROOT / test).read_text() for page, test in ELSEWHERE.items())


@pytest.mark.parametrize("start", SIGNATURES)
def test_a_signature_is_that_of_the_code(start):
    module = pytest.importorskip("cubegrad.optax") if start.islower() else cubegrad
    (shown,) = (block for block in blocks(SIGNATURES[start]) if block.startswith(start))
    function = ast.parse(f"def {shown.strip()}: ...").body[0]
    own = inspect.signature(getattr(module, function.name)).parameters.values()
    documented = [a.arg for a in function.args.args], [a.arg for a in function.args.kwonlyargs]
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    assert documented == tuple([p.name for p in own if p.kind is kind] for kind in kinds)
    defaults = (*function.args.defaults, *function.args.kw_defaults)
    values = [ast.literal_eval(value) for value in defaults]
    assert values == [p.default for p in own if p.default is not p.empty]


def test_a_broken_block_fails(monkeypatch):
    broken = "optimizer = torch.optim.SGD(parameters, lr=0.1)\n"
    monkeypatch.setitem(globals(), "blocks", lambda _: [broken])
    with pytest.raises(NameError, match="'parameters' is not defined"):
        run("README.md")
