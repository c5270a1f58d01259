"""A GPT on the bytes of a text, and runs of it in processes, each of which is a line of a file."""

import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from cubegrad.study.processes import die_with_parent, no_interrupts

Record = dict[str, Any]
BYTES = 256
VALIDATION = 0.05  # of the text, at its end


class Preset(NamedTuple):
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    seeds: int
    validation_batches: int


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.into = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, preset.width)
        self.places = nn.Parameter(torch.zeros(preset.context, preset.width))
        each = [Block(preset.width, preset.heads) for _ in range(preset.layers)]
        self.blocks = nn.Sequential(*each)
        self.norm = nn.LayerNorm(preset.width)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("out.weight", "narrow.weight"))
                nn.init.normal_(param, std=0.02 / (2 * preset.layers if residual else 1) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        first = (self.bytes(x) + self.places).to(torch.bfloat16)
        hidden = self.norm(self.blocks(first))
        return hidden @ self.bytes.weight.to(hidden.dtype).T


class Text:
    """Windows of bytes, on the device."""

    def __init__(self, path: Path, preset: Preset, device: str) -> None:
        held = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(device)
        last = max(int(len(held) * VALIDATION), 2 * preset.context)
        self.parts = {"train": held[:-last], "validation": held[-last:]}
        self.inside = torch.arange(preset.context + 1, device=device)
        if len(held) < 4 * preset.context:
            raise SystemExit(
                f"{path} has {len(held)} bytes; {4 * preset.context} or more are needed: use a "
                "longer text"
            )

    def windows(self, part: str, seed: int, batches: int, size: int) -> Iterator[Tensor]:
        held, generator = self.parts[part], torch.Generator().manual_seed(seed)
        high = len(held) - len(self.inside) + 1
        starts = torch.randint(high, (batches, size, 1), generator=generator).to(held.device)
        for some in starts:
            yield held[some + self.inside].long()


def load(file: Path) -> list[Record]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def run_all(
    call: Callable[..., Record],
    jobs: list[tuple[Any, ...]],
    result: Callable[[Record], str],
    file: Path,
    workers: int,
    minutes: float = math.inf,
) -> None:
    """Call it with each job's arguments, in processes; each record is a line of the file."""
    started, longest = time.monotonic(), 0.0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=die_with_parent) as pool:
        running: set[Future[Record]] = set()
        count, done = len(jobs), 0
        while jobs or running:
            left = minutes * 60 - (time.monotonic() - started)
            if jobs and longest > left:
                say(f"{len(jobs)} runs are left for the next call: {left:.0f} s are not enough")
                jobs = []
            while jobs and len(running) < workers:
                with no_interrupts():
                    running.add(pool.submit(call, *jobs.pop(0)))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                record, done = future.result(), done + 1
                with file.open("a") as out:
                    out.write(json.dumps(record, ensure_ascii=False) + "\n")
                longest = max(longest, record["seconds"])
                say(f"{done}/{count} {result(record)}")
