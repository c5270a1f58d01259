"""Train a decoder with 7B parameters on one GPU, with about 6 bytes of memory for each parameter.

    python examples/one_gpu_7b.py --text book.txt

The bfloat16 weights take 2 bytes, MADGRAD's compact state 4. Gradients take next to nothing: each
parameter is updated as soon as its gradient is complete, and the gradient is freed at once. Nothing
is downloaded: the model has the shape of Llama 2 7B and random weights, and each byte of the file
is a token. docs/one_gpu.md has measured numbers. `--size 100m` runs on a CPU as well.

This needs transformers, which the extra `problems` installs.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler
from transformers import AutoModelForCausalLM, LlamaConfig

from cubegrad import MADGRAD

# Width, width inside the MLPs, layers, attention heads: 6.74B and 98.7M parameters.
SIZES = {"7b": (4096, 11008, 32, 32), "100m": (768, 2048, 7, 12)}
WARM_UP = 5  # steps


def build(size: str, device: torch.device, seed: int) -> nn.Module:
    """A model with random bfloat16 weights, made on the device without a float32 copy."""
    width, inner, layers, heads = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        use_cache=False,
    )
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    return model


def batches(
    text: Path, tokens: int, steps: int, seed: int, device: torch.device
) -> Iterator[Tensor]:
    """A random piece of the text for each step; each byte is a token."""
    data = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for start in torch.randint(len(data) - tokens + 1, (steps,), generator=generator).tolist():
        yield data[start : start + tokens].long().unsqueeze(0).to(device)


def train(
    model: nn.Module, optimizer: Any, schedule: LRScheduler, data: Iterable[Tensor]
) -> dict[str, Any]:
    """The ordinary loop. Returns losses and seconds of the steps, and the bytes of gradients."""
    losses, seconds, gradients = [], [], 0
    for step, tokens in enumerate(data, 1):
        start = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()  # after release_gradients(), this updates the parameters
        gradients = max(gradients, size_of(param.grad for param in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - start)
        print(f"step {step:3}: loss {losses[-1]:7.4f}, {seconds[-1]:.3f} s", flush=True)
    return {"losses": losses, "seconds": seconds, "gradients": gradients}


def size_of(tensors: Iterable[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated on the GPU; of a CPU's memory, the most this process had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Windows has none

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def memory_parts(device: torch.device, **known: int) -> dict[str, int]:
    """The parts that are known, and what remains of the peak."""
    peak = peak_bytes(device)
    return {**known, "activations and the rest": peak - sum(known.values()), "peak": peak}


def table(parts: dict[str, int], parameters: int) -> str:
    lines = [f"{'':<24} {'GB':>8}  bytes per parameter"]
    for name, size in parts.items():
        lines.append(f"{name.replace('_', ' '):<24} {size / 1e9:8.2f} {size / parameters:8.2f}")
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(options.size, device, options.seed)
    parameters = sum(param.numel() for param in model.parameters())
    print(f"{parameters:,} parameters, {options.tokens:,} tokens per step, on {device.type}")

    optimizer = MADGRAD(model.parameters(), lr=options.lr, compact=True)
    optimizer.release_gradients()
    schedule = LinearLR(optimizer, 1 / WARM_UP, total_iters=WARM_UP)
    data = batches(options.text, options.tokens, options.steps, options.seed, device)
    run = train(model, optimizer, schedule, data)

    state = (value for entries in optimizer.state.values() for value in entries.values())
    weights = size_of(model.parameters())
    memory = memory_parts(device, weights=weights, gradients=run["gradients"], state=size_of(state))
    speed = options.tokens / median(run["seconds"][1:])  # kernels are compiled in the first step
    print(f"\n{speed:,.0f} tokens per second\n\n{table(memory, parameters)}")
    if options.json:
        found = {"parameters": parameters, "tokens_per_second": speed, "memory": memory}
        options.json.write_text(json.dumps(found | {"losses": run["losses"]}, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a file to learn; longer than --tokens")
    add("--size", choices=SIZES, default="7b", help="parameters (%(default)s)")
    add("--steps", type=int, default=30, help="(%(default)s)")
    add("--tokens", type=int, default=2048, help="in a step (%(default)s)")
    add("--lr", type=float, default=1e-5, help="after the warm-up (%(default)s)")
    add("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    add("--json", type=Path, help="a file for the numbers")
    options = parser.parse_args()
    for name in ("steps", "tokens"):
        if (value := getattr(options, name)) < 2:
            parser.error(f"--{name} {value} must be >= 2; use {parser.get_default(name)}")
    if not options.text.is_file():
        parser.error(f"--text {options.text} is no file; give a text file")
    if (length := options.text.stat().st_size) < options.tokens:
        parser.error(
            f"--text {options.text} has {length} bytes, fewer than --tokens {options.tokens}; "
            f"give a longer file or fewer tokens"
        )
    return options


if __name__ == "__main__":
    main()
