"""The tokenizer of a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerFast":
    """The fast tokenizer, with the checkpoint's chat template where it has one.

    Raises ValueError where the folder holds none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds to import; networks do without it

    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json: save the checkpoint's fast tokenizer into it")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer
