"""Tokenizers made on the spot, whose characters fall apart into bytes in both of the common ways."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EMOJI = "😀"


def train_byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE; ids 0 and 1 are special, and some merged tokens end in half a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world STOP 你好 世界 日本 é è 😀 😁 a€b€"] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def build_byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama-2's: words carry their space as a metasymbol, and what has no token of its own is spelt in bytes."""
    vocab = {"<s>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    for token in ("▁hello", "▁world", "é", "a", "▁", "\n"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


BYTE_LEVEL = train_byte_level()
BYTE_FALLBACK = build_byte_fallback()


def byte_ids(text: str) -> list[int]:
    """Ids of BYTE_LEVEL, one a byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [BYTE_LEVEL.convert_tokens_to_ids(char) for piece, _ in pieces for char in piece]


def fallback_ids(data: bytes) -> list[int]:
    """Ids of BYTE_FALLBACK, one a byte."""
    return [2 + byte for byte in data]


def pieces_of(items: list[int], sizes: list[int]) -> list[list[int]]:
    """Cuts `items` into runs of the given sizes, over and over."""
    runs, start, index = [], 0, 0
    while start < len(items):
        size = sizes[index % len(sizes)]
        runs.append(items[start : start + size])
        start, index = start + size, index + 1
    return runs
