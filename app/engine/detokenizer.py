"""Text of a sequence that grows token by token."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
MAX_CHAR_BYTES = 4  # in UTF-8
MAX_HELD_TOKENS = 12  # more than any one character has: what is held longer is cut down to its last few tokens
NUM_PROMPT_TOKENS = 8  # of the prompt's end, seen for the sake of the joint between prompt and answer


class Detokenizer:
    """Decodes ids as they come; what `push` and `flush` return, joined, is what the ids add to the prompt's text.

    With a byte-level tokenizer and a prompt that ends on a whole character this equals decoding the ids at once.
    A character leaves when its last byte has come. Text is never taken back: where a byte-fallback tokenizer turns
    a run of bytes invalid from its start, what is out stays and the rest follows.

    `DecodeStream` does the ordinary token. It says nothing while its text ends in U+FFFD, raises where the text of
    earlier ids changes, and decodes all it holds at each step; so from such a token to the next whole character
    `_push_held` decodes a short window instead.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # `_context` ends on a whole character and is out; of the text of `_held`, which follows it, `_out` is out.
        self._context: list[int] = []
        self._held: list[int] = []
        self._out = ""
        self._see_prompt(prompt_token_ids)
        self._stream = self._new_stream()

    def push(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token completes."""
        return [self._push_ordinary(token_id) or self._push_held(token_id) for token_id in token_ids]

    def _push_ordinary(self, token_id: int) -> str | None:
        if self._held:
            return None
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # its only error: the text of the ids before has changed
            return None
        if text:
            self._context = [token_id]
        return text

    def flush(self) -> str:
        """Text still held: of a character whose last bytes never came, U+FFFD."""
        text = self._text_after_context()
        fresh = self._remainder(self._decode(self._held) if text is None else text)
        self._held, self._out = [], ""
        return fresh

    def _see_prompt(self, token_ids: Sequence[int]) -> None:
        """Takes in the prompt's end; its text counts as out, also that of a character the answer may complete."""
        num_seen = NUM_PROMPT_TOKENS
        text = self._decode(list(token_ids[-num_seen:]))
        while text.startswith(REPLACEMENT) and num_seen < min(len(token_ids), 8 * NUM_PROMPT_TOKENS):
            num_seen *= 2  # it begins within a character, which may spoil the whole run of bytes that it is in
            text = self._decode(list(token_ids[-num_seen:]))
        tail = self._without_skipped(list(token_ids[-num_seen:]))
        for num_held in range(min(len(tail) + 1, MAX_CHAR_BYTES)):
            context = tail[: len(tail) - num_held]
            if not self._decode(context).endswith(REPLACEMENT):
                self._context, self._held = context, tail[len(context) :]
                break
        else:
            self._held = tail
        text_after_context = self._text_after_context()
        self._out = self._decode(self._held) if text_after_context is None else text_after_context

    def _push_held(self, token_id: int) -> str:
        self._held += self._without_skipped([token_id])
        text = self._text_after_context()
        if text is None:
            text = self._decode(self._held)
            if text.endswith(REPLACEMENT) and len(self._held) < MAX_CHAR_BYTES:
                return ""  # a byte-fallback run is all U+FFFD while its last character lacks bytes
            self._context = []  # the decoder took back text that is out: what is held stands alone from here on
        num_undecided = min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_CHAR_BYTES - 1)
        if num_undecided:
            return self._release_decided(text, num_undecided)
        fresh = self._remainder(text)
        if self._held and (text or not self._context):
            self._context = self._held
        self._held, self._out = [], ""
        self._stream = self._new_stream()
        return fresh

    def _release_decided(self, text: str, num_undecided: int) -> str:
        """Lets go of all but the last replacement characters, which the next bytes may still change."""
        decided = text[:-num_undecided]
        fresh = self._remainder(decided)
        if fresh:
            self._out = decided
        if len(self._held) > MAX_HELD_TOKENS:
            num_pending = len(self._remainder(text))
            num_kept, undecided = MAX_CHAR_BYTES, REPLACEMENT * num_undecided
            while not (window := self._decode(self._held[-num_kept:])).endswith(undecided):
                num_kept += 1
                assert num_kept <= len(self._held)
            self._context, self._held = [], self._held[-num_kept:]
            self._out = window[: len(window) - num_pending]
        return fresh

    def _remainder(self, text: str) -> str:
        """What `text` adds to what is out; they differ only where a token has changed the prompt's last characters."""
        if text.startswith(self._out):
            return text[len(self._out) :]
        pairs = zip(self._out, text, strict=False)
        return text[next((i for i, (before, now) in enumerate(pairs) if before != now), len(text)) :]

    def _text_after_context(self) -> str | None:
        """Text of `_held`; None where with it the text of `_context` is another than went out."""
        before = self._decode(self._context)
        text = self._decode(self._context + self._held)
        return text[len(before) :] if text.startswith(before) else None

    def _without_skipped(self, token_ids: list[int]) -> list[int]:
        """Without special tokens that have no text: they must not lengthen what is held."""
        if not self._skip_special_tokens:
            return token_ids
        return [i for i in token_ids if self._decode([i]) or not self._tokenizer.decode([i], skip_special_tokens=False)]

    def _new_stream(self) -> DecodeStream:
        return DecodeStream(ids=self._context, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
