"""MADGRAD as DeepSpeed's client optimizer, with ZeRO stage 2 or 3.

    deepspeed --num_gpus 2 examples/deepspeed_zero.py --stage 3
    DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py

Stop it at any time and start it again: it goes on from its last checkpoint.
"""

import argparse

import deepspeed
import torch
from torch import nn

from cubegrad import MADGRAD

STEPS, SAVE_EVERY = 100, 20


def main(stage: int, folder: str) -> None:
    config = {
        "train_batch_size": 64,
        "bf16": {"enabled": True},  # the optimizer gets float32 copies of the weights
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,  # needed for any optimizer but DeepSpeed's and Adam
    }
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = MADGRAD(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.load_checkpoint(folder)  # warns and goes on if there is none
    for step in range(engine.global_steps, STEPS):
        torch.manual_seed(step * engine.dp_world_size + engine.global_rank)
        points = torch.randn(engine.train_micro_batch_size_per_gpu(), 2, device=engine.device)
        labels = (points.norm(dim=1) > 1.2).long()  # inside or outside a circle
        loss = nn.functional.cross_entropy(engine(points.bfloat16()).float(), labels)
        engine.backward(loss)
        engine.step()
        if (step + 1) % SAVE_EVERY == 0:
            engine.save_checkpoint(folder)
            print(f"rank {engine.global_rank}, step {step + 1}: loss {loss.item():.9f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--folder", default="out/deepspeed", help="of checkpoints")
    parser.add_argument("--local_rank", help="DeepSpeed's launcher passes it")
    options = parser.parse_args()
    main(options.stage, options.folder)
