"""Plain completions: the engine's deltas as Completion, which whole responses and chunks share."""

from dataclasses import dataclass
from typing import Any

from app.api.logprobs import prompt_logprobs_by_id, text_logprobs
from app.api.protocol import CompletionRequest
from app.api.responses import Envelope, TextChoice, TextLogprobs, TextResponse, choice_extensions
from app.api.token_texts import TextOffsets, TokenTexts
from app.engine.outputs import SequenceDelta
from app.engine.plan import TokenLogprobs


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as its answer repeats it."""

    text: str
    token_ids: list[int]
    is_text: bool  # it came as text: special tokens written in it are part of it


class CompletionFormat:
    """Text, with the prompt before it where `echo` asks for that."""

    def __init__(
        self, request: CompletionRequest, envelope: Envelope, token_texts: TokenTexts, echoed: list[EchoedPrompt]
    ) -> None:
        self._request = request
        self._fields = envelope.fields()
        self._token_texts = token_texts
        self._echoed = echoed  # one a prompt; empty without `echo`
        self._offsets: dict[int, TextOffsets] = {}  # by choice

    def choice(self, index: int, prompt: int, whole: SequenceDelta) -> TextChoice:
        return self.chunk_choice(index, prompt, whole, is_first=True)

    def response(self, choices: list[TextChoice], fields: dict[str, Any]) -> TextResponse:
        return TextResponse(object="text_completion", choices=choices, **self._fields, **fields)

    def chunk_choice(self, index: int, prompt: int, delta: SequenceDelta, is_first: bool) -> TextChoice:
        echoed = self._echoed[prompt] if self._echoed and is_first else None
        fields = choice_extensions(delta, self._request.return_token_ids)
        if self._request.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs_by_id(delta.prompt_logprobs, self._token_texts)
        return TextChoice(
            index=index,
            text=delta.text if echoed is None else echoed.text + delta.text,
            logprobs=self._logprobs(index, delta, echoed),
            finish_reason=delta.finish_reason,  # type: ignore[arg-type]  # "abort" and "error" never come here
            **fields,
        )

    def chunk(self, choices: list[TextChoice], fields: dict[str, Any]) -> TextResponse:
        return self.response(choices, fields)

    def _logprobs(self, index: int, delta: SequenceDelta, echoed: EchoedPrompt | None) -> TextLogprobs | None:
        if self._request.logprobs is None or (echoed is None and not delta.logprobs):
            return None
        prompt_ids: list[int] = []
        prompt_logprobs: list[TokenLogprobs | None] = []
        prompt_offsets: list[int] = []
        if echoed is not None:
            assert delta.prompt_logprobs is not None, "an echoed prompt came without its logprobs"
            prompt_ids, prompt_logprobs = echoed.token_ids, delta.prompt_logprobs
            prompt_offsets = self._prompt_offsets(echoed)
        start = len(echoed.text) if echoed is not None else 0
        offsets = self._offsets.setdefault(
            index, TextOffsets(self._token_texts, self._request.skip_special_tokens, start)
        )
        return text_logprobs(
            prompt_ids, prompt_logprobs, prompt_offsets, delta.logprobs or [], offsets, self._token_texts
        )

    def _prompt_offsets(self, echoed: EchoedPrompt) -> list[int]:
        """What the tokenizer put before the text (a BOS token, a space) begins with the text, at 0."""
        skip_special_tokens = self._request.skip_special_tokens and not echoed.is_text
        offsets = TextOffsets(self._token_texts, skip_special_tokens)
        starts = [offsets.advance(token_id) for token_id in echoed.token_ids]
        num_chars_before = max(offsets.position - len(echoed.text), 0)
        return [max(start - num_chars_before, 0) for start in starts]
