"""Joins a request's deltas to its output."""

from app.engine.outputs import CompletionOutput, GenerationRequest, RequestOutput, SequenceDelta, SpeculationStats
from app.engine.plan import TokenLogprobs


class OutputCollector:
    """Takes the deltas of one request until each of its choices has finished."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._choices = [
            CompletionOutput(index, "", [], None, "abort", None, SpeculationStats()) for index in range(request.n)
        ]
        self._num_unfinished = request.n
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0

    def add(self, delta: SequenceDelta) -> None:
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            choice.logprobs = [*(choice.logprobs or ()), *delta.logprobs]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        if delta.index == 0:  # later choices also hit what their siblings have computed
            self._num_cached_tokens += delta.num_cached_tokens
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason, choice.error = (
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
            )
            choice.stats = delta.stats or choice.stats
            self._num_unfinished -= 1

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def output(self) -> RequestOutput:
        """What has come in; choices that have not finished say "abort"."""
        return RequestOutput(
            self._request.request_id,
            self._request.prompt_token_ids,
            self._prompt_logprobs,
            self._choices,
            self._num_cached_tokens,
        )
