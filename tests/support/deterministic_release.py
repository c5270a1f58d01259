"""Train examples/one_gpu_7b.py's model of 100M with and without gradient release; print the losses.

On a GPU two runs of the same script differ in their last bits, unless torch is told otherwise.
"""

import json
import os
import sys
from pathlib import Path

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it when it starts

import torch
from torch.optim.lr_scheduler import LinearLR

from cubegrad import MADGRAD

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import one_gpu_7b as example


def losses(text: Path, release: bool, tokens: int = 256, steps: int = 5) -> list[float]:
    device = torch.device("cuda")
    model = example.build("100m", device, seed=0)
    optimizer = MADGRAD(model.parameters(), lr=1e-5, compact=True)
    if release:
        optimizer.release_gradients()
    schedule = LinearLR(optimizer, 1 / example.WARM_UP, total_iters=example.WARM_UP)
    found = []
    for batch in example.batches(text, tokens, steps, 0, device):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    sys.stdout.write(json.dumps([losses(Path(sys.argv[1]), release) for release in (False, True)]))
