"""Hugging Face's Trainer with MADGRAD: a tiny Llama learns to count in steps of 1, 2 or 3.

python examples/transformers_trainer.py             # a fixed learning rate
python examples/transformers_trainer.py --auto      # an estimated one, logged
python examples/transformers_trainer.py --resume    # from the last checkpoint in --folder
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import cubegrad
from cubegrad import MADGRAD


class AutoTrainer(Trainer):
    """Logs the estimate of lr="auto"; the logged `learning_rate` is a factor on it."""

    def log(self, logs, start_time=None):
        super().log({**logs, "estimated_lr": cubegrad.estimated_lr(self)}, start_time)


def counting(rows: int, length: int = 16) -> list[dict[str, torch.Tensor]]:
    starts, steps = torch.randint(32, (rows, 1)), torch.randint(1, 4, (rows, 1))
    tokens = (starts + steps * torch.arange(length)) % 32
    return [{"input_ids": row, "labels": row} for row in tokens]


def train(folder: str, auto: bool = False, by_class: bool = False, resume: bool = False) -> Trainer:
    set_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_dropout=0.1))
    every = {"logging_steps": 20, "save_steps": 70}
    args = TrainingArguments(folder, num_train_epochs=5, warmup_steps=20, **every)
    lr = "auto" if auto else 4e-3
    if by_class:  # the Trainer builds it, with args.weight_decay for the matrices only
        choice = {"optimizer_cls_and_kwargs": (MADGRAD, {"lr": lr})}
    else:
        choice = {"optimizers": (MADGRAD(model.parameters(), lr=lr), None)}
    trainer_class = AutoTrainer if auto else Trainer
    trainer = trainer_class(model, args, train_dataset=counting(256), **choice)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="out/trainer", help="of checkpoints")
    parser.add_argument("--auto", action="store_true", help='lr="auto"')
    parser.add_argument("--by-class", action="store_true", help="by optimizer_cls_and_kwargs")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    trainer = train(**vars(parser.parse_args()))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"first 20 steps: loss {losses[0]:.3f}, last 20 steps: loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
