"""A masked language model of the user's, such as a BERT or RoBERTa."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from cubegrad.study.data.masking import Masked
from cubegrad.study.data.tokens import LARGEST, PAD, SPECIAL
from cubegrad.study.models import own_folder
from cubegrad.study.problem import StudyError


class OwnMasked(nn.Module):
    """The model, over the study's token ids: SPECIAL more than the tokenizer's."""

    def __init__(self, model: nn.Module, special: list[int], count: int) -> None:
        super().__init__()
        self.model = model
        self.own_ids: Tensor
        ids = torch.tensor([*special, *range(count)])
        self.register_buffer("own_ids", ids, persistent=False)

    def predict(self, blocks: Masked) -> Tensor:
        """The scores of all tokens at the masked places."""
        seen = (blocks.inputs != PAD).long()
        scores = self.model(input_ids=self.own_ids[blocks.inputs], attention_mask=seen).logits
        places = blocks.places[:, :, None].expand(-1, -1, scores.shape[2])
        return pad(scores.gather(1, places), (SPECIAL, 0), value=-math.inf)


def tokenizer(folder: Path) -> tuple[Any, list[int], int]:
    """Without special tokens of its own; the ids of BEGIN, PAD, END, UNKNOWN, MASK; its size."""
    library: Any = own_folder.read(folder, "AutoTokenizer")
    special = [
        library.cls_token_id if library.cls_token_id is not None else library.bos_token_id,
        library.pad_token_id,
        library.sep_token_id if library.sep_token_id is not None else library.eos_token_id,
        library.unk_token_id if library.unk_token_id is not None else library.pad_token_id,
        library.mask_token_id,
    ]
    if not library.is_fast or None in special:
        raise StudyError(
            f"the tokenizer in {folder} must be a fast one with tokens for the beginning, the end, "
            "padding and masks; use a masked language model, such as a RoBERTa or BERT"
        )
    if SPECIAL + len(library) > LARGEST:
        raise StudyError(
            f"the tokenizer in {folder} has {len(library)} tokens, and at most "
            f"{LARGEST - SPECIAL} fit; use a model with a smaller vocabulary"
        )
    # "[SEP]" and the like are added by the blocks.
    return own_folder.without_special_tokens(library), special, len(library)


def model(folder: Path, special: list[int], count: int, length: int) -> OwnMasked:
    own: Any = own_folder.read_model(folder, "AutoModelForMaskedLM", length)
    return OwnMasked(own, special, count)
