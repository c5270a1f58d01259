"""A transformer sharded by FSDP2, trained with MADGRAD, that survives the death of a process.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp2.py

This runs on CPUs with gloo, on GPUs with nccl, and unchanged on several nodes
(docs/distributed.md). The model learns to add modulo 53. Each step's batch depends on the step
alone, so a run that was killed and restarted ends like an uninterrupted one, bit for bit at the
same number of processes.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from cubegrad import MADGRAD

NUMBERS = 53
BATCH = 96  # over all processes


class Adder(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUMBERS, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, NUMBERS)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.embedding(pairs)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """This process's share of a step's batch."""
    pairs = torch.randint(NUMBERS, (BATCH, 2), generator=torch.Generator().manual_seed(step))
    mine = pairs.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return mine, mine.sum(1) % NUMBERS


def contents(model: nn.Module, optimizer: MADGRAD) -> dict[str, object]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def save(folder: Path, step: int, model: nn.Module, optimizer: MADGRAD) -> None:
    """Write a checkpoint, and rename it to `step-N` when it is complete; only those are loaded."""
    writing, place = folder / f"writing-{step}", folder / f"step-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(writing, ignore_errors=True)  # left by a run that was killed
    dist.barrier()
    dcp.save(contents(model, optimizer), checkpoint_id=writing)
    dist.barrier()
    if dist.get_rank() == 0:
        writing.rename(place)
        for old in complete(folder)[:-2]:
            # Renamed first: half deleted, it is not a complete checkpoint any more.
            shutil.rmtree((folder / f"step-{old}").rename(folder / f"old-{old}"))


def complete(folder: Path) -> list[int]:
    """The steps that have a complete checkpoint."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def resume(folder: Path, model: nn.Module, optimizer: MADGRAD) -> int:
    """Load the last complete checkpoint that rank 0 sees; returns its step."""
    found: list[int] = [max(complete(folder), default=0)]
    dist.broadcast_object_list(found, src=0)
    if found[0]:
        saved = contents(model, optimizer)
        dcp.load(saved, checkpoint_id=folder / f"step-{found[0]}")
        weights, state = saved["model"], saved["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return found[0]


def sharded(device: str, options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = Adder().to(device)
    shape = (options.replicas, dist.get_world_size() // options.replicas)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy()
    if options.bf16:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model = fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    return model


def train(device: str, options: argparse.Namespace) -> None:
    model = sharded(device, options)
    optimizer = MADGRAD(model.parameters(), lr=options.lr)  # after sharding, never before
    first = resume(options.folder, model, optimizer)
    say(f"{dist.get_world_size()} processes on {device}, from step {first}")
    for step in range(first, options.steps):
        inputs, targets = batch(step, device)
        loss = cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            save(options.folder, step + 1, model, optimizer)
            say(f"step {step + 1}: loss {loss.item():.4f}")
    whole = [param.detach().full_tensor().cpu() for param in model.parameters()]
    digest = hashlib.sha256(b"".join(param.numpy().tobytes() for param in whole))
    say(f"done, parameters {digest.hexdigest()[:16]}")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/fsdp2"), help="of checkpoints")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--replicas", type=int, default=1, help="> 1 shards within each of them")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    options = parser.parse_args()
    for name in ("steps", "save_every", "replicas"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be >= 1")
    if "WORLD_SIZE" not in os.environ:
        command = " ".join(sys.argv)
        parser.error(f"no job to join; use torchrun --standalone --nproc-per-node 2 {command}")
    world = int(os.environ["WORLD_SIZE"])
    if BATCH % world or world % options.replicas:
        parser.error(
            f"{world} processes must divide the batch of {BATCH} and be a multiple of "
            f"--replicas {options.replicas}; use 2, 4 or 8 processes"
        )
    return options


def main() -> None:
    options = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    options.folder.mkdir(parents=True, exist_ok=True)
    train(device, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
