"""README's quick start as a user runs it: `python quick_start.py README.md [BACKEND]`.

Needs torch and an installed cubegrad only. With a second argument, that backend must be there.
"""

import re
import sys
from pathlib import Path
from typing import Any

import torch

import cubegrad


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert block, "no Python block"
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 64), torch.randint(10, (16,))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    loss_fn = torch.nn.CrossEntropyLoss()
    names: dict[str, Any] = {"torch": torch, "model": model, "loss_fn": loss_fn}
    names |= {"inputs": inputs, "targets": targets, "batches": [(inputs, targets)] * 3}
    exec(compile(block[1], "README.md", "exec"), names)
    losses = []
    for _ in range(30):
        names["optimizer"].zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        names["optimizer"].step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses  # 0.001 of it was measured
    backends = cubegrad.backends.available()
    for name in sys.argv[2:]:
        assert backends[name] == "available", backends
    sys.stdout.write(f"{cubegrad.__version__}\n{cubegrad.__file__}\n{backends['cpu']}\n")


if __name__ == "__main__":
    main()
