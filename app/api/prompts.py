"""Text to token ids, without holding up the event loop, and the prompts that a context cannot hold."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from app.api.chat_template import ChatTemplate
from app.api.errors import APIError, context_length_error
from app.api.protocol import ChatCompletionRequest

Result = TypeVar("Result")

_MAX_INLINE_CHARS = 2048
"""About a millisecond of tokenising: a thread would cost a good part of that, and waits for its turn."""

_CHARS_OF_A_CALL = 64
"""What a call costs, however short its text."""

_MAX_SHRINKAGE = 4
"""Characters that normalisation may join to one (Unicode NFC), at most."""


class PromptEncoder:
    """Token ids of prompts, chats and words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._chat_template = ChatTemplate(tokenizer)
        self._max_model_len = max_model_len
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))

    async def encode_chat(self, request: ChatCompletionRequest) -> list[int]:
        """The template writes the special tokens; the tokenizer adds none."""
        texts = [message.text for message in request.messages]
        self._refuse_hopeless(sum(map(len, texts)), "messages")
        return await _run(texts, lambda: self._encode(self._chat_template.render(request), False))

    async def encode_texts(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """An empty text begins a new document: the token that begins one, or else the one that ends one."""
        self._refuse_hopeless(max(map(len, texts)), "prompt")
        encoded = await _run(texts, lambda: [self._encode(text, add_special_tokens) for text in texts])
        return [token_ids or [self._document_start()] for token_ids in encoded]

    async def encode_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it is tokenised at the start of a text and, where that differs, after a space."""
        if not all(words):
            raise APIError(400, "'bad_words' has an empty string: leave it out.", param="bad_words")

        def encode() -> list[list[int]]:
            spellings = (self._encode(spelling, False) for word in words for spelling in (word, " " + word.lstrip()))
            return [list(token_ids) for token_ids in dict.fromkeys(map(tuple, spellings)) if token_ids]

        return await _run(words, encode)

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def _refuse_hopeless(self, num_chars: int, param: str) -> None:
        """Keeps megabytes that no tokenisation fits into the context from being tokenised."""
        least = num_chars // (_MAX_SHRINKAGE * self._max_token_chars)
        if least > self._max_model_len:
            raise context_length_error(least, 1, self._max_model_len, param, at_least=True)

    def _document_start(self) -> int:
        for token_id in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token_id is not None:
                return token_id
        raise APIError(400, "'prompt' is empty, and this model has no token to begin with.", param="prompt")


async def _run(texts: list[str], function: Callable[[], Result]) -> Result:
    """Calls `function`, which encodes `texts`, here or in a thread."""
    num_chars = sum(map(len, texts)) + _CHARS_OF_A_CALL * len(texts)
    return function() if num_chars <= _MAX_INLINE_CHARS else await asyncio.to_thread(function)
