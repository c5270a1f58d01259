"""What the steps do after an AdamW run goes on as MADGRADW, beside those of AdamW itself.

    python benchmarks/evidence/go_on_from_adamw.py --text novels.txt --json out.json

A byte-level GPT of 2 layers trains with AdamW at a constant rate. Then three runs go on from its
weights, over the same batches: AdamW with its state, MADGRADW with that state converted by
`cubegrad.interop.convert`, and MADGRADW with no state. The table has the training loss of the
next steps and, for the first one, how far the weights move and in which direction beside AdamW's.
All numbers are means over the seeds; the file has each.
"""

import argparse
import copy
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import cubegrad

sys.path.append(str(Path(__file__).parents[1]))
from shared import byte_gpt, facts

PRESET = byte_gpt.Preset(128, 2, 4, 96, 12, 1500, 2, 20)
SETTINGS: dict[str, float] = {"lr": 2e-3, "weight_decay": 0.1}
SPANS = (10, 100, 500)  # steps after the change, over which losses are averaged
NAMES = ("AdamW, goes on", "MADGRADW, from AdamW's state", "MADGRADW, no state")


def losses(model: nn.Module, optimizer: Any, windows: Iterator[Tensor]) -> Iterator[float]:
    for batch in windows:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item() / math.log(2)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def going_on(name: str, adamw: torch.optim.AdamW, params: Any) -> Any:
    state = copy.deepcopy(adamw.state_dict())  # loading it would share its tensors
    if name.startswith("AdamW"):
        optimizer: Any = torch.optim.AdamW(params, **SETTINGS)
        optimizer.load_state_dict(state)
        return optimizer
    optimizer = cubegrad.MADGRADW(params, **SETTINGS)
    if "no state" not in name:
        optimizer.load_state_dict(cubegrad.interop.convert(state))
    return optimizer


def measure(
    data: byte_gpt.Text, preset: byte_gpt.Preset, after: int, seed: int
) -> list[dict[str, Any]]:
    torch.manual_seed(seed)
    model = byte_gpt.GPT(preset)
    adamw = torch.optim.AdamW(model.parameters(), **SETTINGS)
    before = list(losses(model, adamw, data.windows("train", 2 * seed, preset.steps, preset.batch)))
    rows, first_moves = [], {}
    for name in NAMES:
        own = copy.deepcopy(model)
        run = losses(
            own,
            going_on(name, adamw, own.parameters()),
            data.windows("train", 2 * seed + 1, after, preset.batch),
        )
        seen = [next(run)]
        move = first_moves[name] = flat(own) - flat(model)
        seen += run
        adams = first_moves[NAMES[0]]
        rows.append(
            {
                "name": name,
                "seed": seed,
                "before": mean(before[-100:]),
                "losses": {str(n): mean(seen[:n]) for n in SPANS if n <= after},
                "last": mean(seen[-max(1, after // 5) :]),
                "length": (move.norm() / adams.norm()).item(),
                "cosine": (torch.dot(move, adams) / move.norm() / adams.norm()).item(),
            }
        )
        byte_gpt.say(f"seed {seed}, {name}: {rows[-1]['losses']}")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    spans = list(rows[0]["losses"])
    heads = ["", "first step: length", "cosine", *(f"loss, first {n}" for n in spans), "last fifth"]
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for name in NAMES:
        own = [row for row in rows if row["name"] == name]
        moves = [mean(row[key] for row in own) for key in ("length", "cosine")]
        losses = [mean(row["losses"][n] for row in own) for n in spans]
        losses.append(mean(row["last"] for row in own))
        cells = [*(f"{one:.2f}" for one in moves), *(f"{one:.3f}" for one in losses)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    before = mean(row["before"] for row in rows)
    return "\n".join([*lines, "", f"The last 100 steps of AdamW before: {before:.3f} bits a byte."])


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=PRESET.steps, help="of AdamW")
    parser.add_argument("--after", type=int, default=500, help="steps after it")
    parser.add_argument("--seeds", type=int, default=PRESET.seeds)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    preset = PRESET._replace(steps=options.steps)
    data = byte_gpt.Text(options.text, preset, "cpu")
    rows = [
        row for seed in range(options.seeds) for row in measure(data, preset, options.after, seed)
    ]
    if options.json:
        about = {
            "machine": facts.processor(),
            "threads": torch.get_num_threads(),
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "cubegrad": facts.version("cubegrad"),
            "torch": torch.__version__,
            "steps": preset.steps,
            "settings": SETTINGS,
        }
        facts.write(about | {"rows": rows}, options.json)
    byte_gpt.say(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
