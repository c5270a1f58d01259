"""A causal language model of the user's, such as a GPT-2 or Llama: it predicts the next token."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from cubegrad.study.data.masking import Masked
from cubegrad.study.data.next_token import WithEnd
from cubegrad.study.models import own_folder
from cubegrad.study.problem import StudyError


class OwnCausal(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def predict(self, blocks: Masked) -> Tensor:
        """The scores of all tokens at every place but the first."""
        scores: Tensor = self.model(input_ids=blocks.inputs).logits[:, :-1]
        return scores


def tokenizer(folder: Path) -> WithEnd:
    library: Any = own_folder.read(folder, "AutoTokenizer")
    if not library.is_fast:
        raise StudyError(
            f"the tokenizer in {folder} is a slow one, without the library tokenizers; save the "
            "model's fast tokenizer there"
        )
    if library.eos_token_id is None:
        raise StudyError(
            f"the tokenizer in {folder} has no end-of-text token, which goes between documents; "
            "set its eos_token and save it again"
        )
    size = 1 + max(library.get_vocab().values())
    return WithEnd(own_folder.without_special_tokens(library), library.eos_token_id, size)


def model(folder: Path, size: int, length: int) -> OwnCausal:
    own = own_folder.read_model(folder, "AutoModelForCausalLM", length)
    rows = len(own.get_input_embeddings().weight)
    if rows < size:
        raise StudyError(
            f"the tokenizer in {folder} has {size} tokens and the model's embedding {rows}; save "
            "the model's own tokenizer there, or resize_token_embeddings of the model"
        )
    own.config.get_text_config().use_cache = False  # the keys and values are for generating text
    return OwnCausal(own)
