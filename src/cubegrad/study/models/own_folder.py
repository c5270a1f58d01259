"""A user's folder with a language model and its tokenizer, read by transformers without network."""

from pathlib import Path
from typing import Any, Literal

from cubegrad.study.problem import StudyError, optional

SAVED = "put there what save_pretrained of a language model and of its tokenizer write"


def kind(folder: Path) -> Literal["masked", "causal"]:
    """What the model predicts, by its configuration. A BERT saved as a decoder is causal."""
    config: Any = read(folder, "AutoConfig")
    library = optional("transformers")
    if getattr(config, "quantization_config", None) is not None:
        raise StudyError(
            f"the model in {folder} is quantized, and weights are trained in float32 here; use "
            "the model it was made from"
        )
    decoder = getattr(config, "is_decoder", False)
    if type(config) in library.MODEL_FOR_MASKED_LM_MAPPING and not decoder:
        return "masked"
    if type(config) in library.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "causal"
    raise StudyError(
        f"the model in {folder} is of the type {config.model_type!r}, which transformers has "
        "neither as a causal nor as a masked language model; use a causal one, such as a GPT-2, "
        "Llama or Qwen, or a masked one, such as a BERT or RoBERTa"
    )


def read(folder: Path, loader: str) -> Any:
    """What a class of transformers such as AutoConfig reads from the folder."""
    try:
        return getattr(optional("transformers"), loader).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise StudyError(
            f"{folder} has no model that transformers' {loader} can read ({reason}); {SAVED}"
        ) from None


def read_model(folder: Path, loader: str, length: int) -> Any:
    """The model in float32, if it can read blocks of `length` tokens."""
    optional("transformers").logging.disable_progress_bar()  # one for each run, amid the study's
    own = read(folder, loader)
    places = getattr(own.config.get_text_config(), "max_position_embeddings", length)
    if places < length:
        raise StudyError(
            f"the model in {folder} reads {places} tokens and blocks have {length}; use another"
        )
    return own.float()


def without_special_tokens(library: Any) -> Any:
    """A copy of a fast tokenizer, as its settings change, that adds no tokens and cuts nothing."""
    copy = optional("tokenizers").Tokenizer.from_str(library.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.post_processor = None
    return copy
