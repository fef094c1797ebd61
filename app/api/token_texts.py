"""What single tokens say, for logprobs: bytes, and text where the bytes are whole characters."""

import codecs
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase


class TokenTexts:
    """Bytes and text of a vocabulary's tokens: byte-level ones, and those of SentencePiece with byte fallback."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = tokenizer.added_tokens_decoder
        decoder = tokenizer.backend_tokenizer.decoder
        self._is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._byte_of_char = _byte_level_alphabet()
        self._cached: dict[int, bytes] = {}  # grows to the tokens that were asked for

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for ids beyond the tokenizer's, which a padded vocabulary has."""
        token_bytes = self._cached.get(token_id)
        if token_bytes is None:
            token_bytes = self._cached[token_id] = self._spell(token_id)
        return token_bytes

    def text_of(self, token_id: int) -> str:
        """The token's characters; of one that ends inside a character its bytes, escaped: \\xf0\\x9f."""
        token_bytes = self.bytes_of(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def is_whole(self, token_id: int) -> bool:
        """Whether the token is made of whole characters."""
        try:
            self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            return False
        return True

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and self._added[token_id].special

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        assert isinstance(token, str)
        if self._is_byte_level:
            return b"".join(self._byte_of_char.get(char, char.encode()) for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


class TextOffsets:
    """Where each token begins in the text of its choice, in characters, as the tokens come in.

    A token that continues a character begins where that character does.
    """

    def __init__(self, token_texts: TokenTexts, skip_special_tokens: bool, start: int = 0) -> None:
        self._token_texts = token_texts
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.position = start

    def advance(self, token_id: int) -> int:
        """The token's offset; the next token follows it."""
        offset = self.position
        if not (self._skip_special_tokens and self._token_texts.is_special(token_id)):
            self.position += len(self._decoder.decode(self._token_texts.bytes_of(token_id)))
        return offset


@lru_cache(maxsize=1)
def _byte_level_alphabet() -> dict[str, bytes]:
    """The characters that byte-level vocabularies write bytes with: printable ones are themselves, the rest
    follow from U+0100 on (GPT-2, encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {character: bytes([byte]) for byte, character in characters.items()}
