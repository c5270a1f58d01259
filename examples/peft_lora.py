"""LoRA by PEFT with MADGRAD: a tiny Llama that counts in steps of 1, 2 or 3 learns steps of 4.

python examples/peft_lora.py           # a fixed learning rate
python examples/peft_lora.py --auto    # an estimated one
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from cubegrad import MADGRAD


def train(model: torch.nn.Module, optimizer: MADGRAD, counts: list[int], steps: int) -> None:
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)  # with lr="auto", from a factor of 1 to 0
    for step in range(1, steps + 1):
        by = torch.tensor(counts)[torch.randint(len(counts), (32, 1))]
        tokens = (torch.randint(32, (32, 1)) + by * torch.arange(16)) % 32
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step in (1, steps):
            print(f"counting by {counts}, step {step}: loss {loss.item():.3f}")


def save(model: PeftModel, optimizer: MADGRAD, folder: Path) -> None:
    model.save_pretrained(folder)  # the adapter alone
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def load(base: PreTrainedModel, folder: Path, lr: float | str) -> tuple[PeftModel, MADGRAD]:
    model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    optimizer = MADGRAD([p for p in model.parameters() if p.requires_grad], lr=lr)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    return model, optimizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("out/lora"), help="for the adapter")
    parser.add_argument("--auto", action="store_true", help='lr="auto"')
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    base = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    train(base, MADGRAD(base.parameters(), lr=4e-3), [1, 2, 3], steps=150)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", r=8))
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = MADGRAD(weights, lr="auto" if options.auto else 1e-2)
    train(model, optimizer, [4], steps=100)
    save(model, optimizer, options.folder)
