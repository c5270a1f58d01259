"""TRL's SFTTrainer with MADGRAD: a tiny Llama learns to add two digits.

python examples/trl_sft.py           # a fixed learning rate
python examples/trl_sft.py --auto    # an estimated one, logged
"""

import argparse

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import cubegrad
from cubegrad import MADGRAD


class AutoTrainer(SFTTrainer):
    """Logs the estimate of lr="auto"; the logged `learning_rate` is a factor on it."""

    def log(self, logs, start_time=None):
        super().log({**logs, "estimated_lr": cubegrad.estimated_lr(self)}, start_time)


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=".", pad_token="_")


def train(folder: str, auto: bool = False) -> SFTTrainer:
    set_seed(0)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    sums = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a, b in pairs]
    sizes = {"vocab_size": 23, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    trainer_class = AutoTrainer if auto else SFTTrainer
    trainer = trainer_class(
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)),
        SFTConfig(folder, num_train_epochs=20, logging_steps=20, bf16=False),  # TRL turns bf16 on
        train_dataset=Dataset.from_list(sums),
        processing_class=tokenizer_of(["_", ".", "+", "=", *map(str, range(19))]),
        optimizer_cls_and_kwargs=(MADGRAD, {"lr": "auto" if auto else 4e-3}),
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="out/sft", help="of checkpoints")
    parser.add_argument("--auto", action="store_true", help='lr="auto"')
    trainer = train(**vars(parser.parse_args()))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"first 20 steps: loss {losses[0]:.3f}, last 20 steps: loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
