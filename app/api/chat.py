"""Chat completions: the engine's deltas as ChatCompletion and ChatCompletionChunk."""

from typing import Any

from openai.types.chat import ChatCompletionMessage, chat_completion, chat_completion_chunk

from app.api.logprobs import chat_logprobs, prompt_logprobs_by_id
from app.api.protocol import ChatCompletionRequest
from app.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    Envelope,
    PromptLogprobs,
    choice_extensions,
)
from app.api.token_texts import TokenTexts
from app.engine.outputs import SequenceDelta


class ChatFormat:
    """The first chunk of a choice brings the role, and the text of the first step with it."""

    def __init__(self, request: ChatCompletionRequest, envelope: Envelope, token_texts: TokenTexts) -> None:
        self._request = request
        self._fields = envelope.fields()
        self._token_texts = token_texts
        self._prompt_logprobs: PromptLogprobs | None = None

    def choice(self, index: int, prompt: int, whole: SequenceDelta) -> ChatChoice:
        logprobs = None
        if self._request.logprobs:
            content = chat_logprobs(whole.logprobs or [], self._token_texts)
            logprobs = chat_completion.ChoiceLogprobs(content=content, refusal=None)
        if whole.prompt_logprobs is not None and self._request.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs_by_id(whole.prompt_logprobs, self._token_texts)
        return ChatChoice(
            index=index,
            message=ChatCompletionMessage(role="assistant", content=whole.text, refusal=None),
            logprobs=logprobs,
            finish_reason=whole.finish_reason,  # type: ignore[arg-type]  # "abort" and "error" never come here
            **choice_extensions(whole, self._request.return_token_ids),
        )

    def response(self, choices: list[ChatChoice], fields: dict[str, Any]) -> ChatResponse:
        if self._prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_logprobs
        return ChatResponse(object="chat.completion", choices=choices, **self._fields, **fields)

    def chunk_choice(self, index: int, prompt: int, delta: SequenceDelta, is_first: bool) -> ChatChunkChoice:
        logprobs = None
        if self._request.logprobs and delta.logprobs:
            content = chat_logprobs(delta.logprobs, self._token_texts)
            logprobs = chat_completion_chunk.ChoiceLogprobs(content=content, refusal=None)
        if is_first:
            chunk_delta = chat_completion_chunk.ChoiceDelta(role="assistant", content=delta.text)
        elif delta.text:
            chunk_delta = chat_completion_chunk.ChoiceDelta(content=delta.text)
        else:
            chunk_delta = chat_completion_chunk.ChoiceDelta()
        return ChatChunkChoice(
            index=index,
            delta=chunk_delta,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]
            **choice_extensions(delta, self._request.return_token_ids),
        )

    def chunk(self, choices: list[ChatChunkChoice], fields: dict[str, Any]) -> ChatChunk:
        return ChatChunk(object="chat.completion.chunk", choices=choices, **self._fields, **fields)
