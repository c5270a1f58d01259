"""A tiny diffusion model of diffusers, trained with MADGRAD, with an average of its weights (EMA).

python examples/diffusers_ema.py
python examples/diffusers_ema.py --auto --adopt 50   # goes on from the average every 50 steps
"""

import argparse

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

from cubegrad import MADGRAD


def noise_loss(model: UNet2DModel, noising: DDPMScheduler, rows: int) -> torch.Tensor:
    """Of images of 8 x 8 that have one bright column."""
    images = torch.eye(8)[torch.randint(8, (rows, 1, 1))].expand(rows, 1, 8, 8) * 2 - 1
    noise, times = torch.randn_like(images), torch.randint(1000, (rows,))
    predicted = model(noising.add_noise(images, noise, times), times).sample
    return torch.nn.functional.mse_loss(predicted, noise)


def train(auto: bool, adopt: int = 0, steps: int = 150) -> tuple[UNet2DModel, MADGRAD, EMAModel]:
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    model, noising = UNet2DModel(8, 1, 1, **blocks, **sizes), DDPMScheduler()
    optimizer = MADGRAD(model.parameters(), lr="auto" if auto else 1e-2)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 10, steps)
    ema = EMAModel(model.parameters(), decay=0.95)  # copies of its own: MADGRAD never sees them
    for step in range(1, steps + 1):
        loss = noise_loss(model, noising, rows=16)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        if adopt and step % adopt == 0:
            with optimizer.edit_weights(keep_momentum=False):  # else the next steps undo the copy
                ema.copy_to(model.parameters())
        if step == 1 or step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    ema.store(model.parameters())  # swapped in and out between two steps: needs no context
    ema.copy_to(model.parameters())
    with torch.no_grad():
        print(f"the average of the weights: loss {noise_loss(model, noising, rows=512):.3f}")
    ema.restore(model.parameters())
    return model, optimizer, ema


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--auto", action="store_true", help='lr="auto"')
    parser.add_argument("--adopt", type=int, default=0, metavar="N", help="every N steps; 0: never")
    train(**vars(parser.parse_args()))
