"""Where an emitted run ends: stop tokens, stop strings, max_tokens and context length, judged token by token."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerFast

from app.engine.detokenizer import Detokenizer
from app.engine.plan import TokenLogprobs
from app.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScannedRun:
    """What is left of an emitted run. `token_ids`, `logprobs` and `text` end at the same token."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    text: str
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that fired; None for EOS


@dataclass(frozen=True, slots=True)
class _End:
    """An end that the ids alone tell, and the index of its token in the run."""

    index: int
    finish_reason: Literal["stop", "length"]
    stop_reason: int | None = None


def ending_token_ids(sampling_params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Token ids that end a request: its own, and EOS unless it is ignored."""
    own = frozenset(sampling_params.stop_token_ids)
    return own if sampling_params.ignore_eos else own | frozenset(eos_token_ids)


class RunScanner:
    """Scans a sequence's emitted runs in order; the first condition to fire cuts all that is reported.

    A stop token counts and is kept in the ids; in the text it shows only where the request includes its
    stops. A stop string is cut from the text, and ends the ids with the token that completes it. Of
    text that may yet become a stop string nothing leaves. Before `min_tokens` neither stops: a token may
    stop when as many stand before it, a string when as many have come with its end.

    Prompt and output together never exceed `max_num_tokens`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast | None,  # None: ids only, no text and no stop strings
        sampling_params: SamplingParams,
        eos_token_ids: Collection[int],
        prompt_token_ids: Sequence[int],
        max_model_len: int,
    ) -> None:
        self._params = sampling_params
        self._stop_token_ids = ending_token_ids(sampling_params, eos_token_ids)
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_output_tokens = 0
        self.max_num_tokens = max_model_len
        if sampling_params.max_tokens is not None:
            self.max_num_tokens = min(max_model_len, self._num_prompt_tokens + sampling_params.max_tokens)
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer.backend_tokenizer, prompt_token_ids, sampling_params.skip_special_tokens
            )
        elif sampling_params.stop:
            raise ValueError(f"stop is {list(sampling_params.stop)!r}: without a tokenizer use stop_token_ids")
        self._stop_strings = StopStrings(sampling_params.stop) if sampling_params.stop else None

    def scan(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None = None) -> ScannedRun:
        """Takes the next emitted run, one token or more; not to be called again once a run has finished."""
        end = self._end_by_ids(token_ids)
        num_kept = len(token_ids) if end is None else end.index + 1
        ends_with_stop_token = end is not None and end.finish_reason == "stop"
        num_shown = num_kept - (ends_with_stop_token and not self._params.include_stop_str_in_output)
        text, stop_string = "", None
        if self._detokenizer is not None:
            if self._stop_strings is None:
                text = self._plain_text(token_ids[:num_shown], finished=end is not None)
            else:
                text, stop_string, num_scanned = self._stoppable_text(token_ids[:num_shown], finished=end is not None)
                if stop_string is not None:
                    num_kept = num_scanned
        self._num_output_tokens += num_kept
        kept_logprobs = None if logprobs is None else logprobs[:num_kept]
        if stop_string is not None:
            return ScannedRun(token_ids[:num_kept], kept_logprobs, text, "stop", stop_string)
        if end is None:
            return ScannedRun(token_ids, kept_logprobs, text)
        return ScannedRun(token_ids[:num_kept], kept_logprobs, text, end.finish_reason, end.stop_reason)

    def flush(self) -> str:
        """Text still held back, for a sequence that ends otherwise than by `scan`."""
        text = self._detokenizer.flush() if self._detokenizer is not None else ""
        return text if self._stop_strings is None else self._stop_strings.flush() + text

    def _end_by_ids(self, token_ids: list[int]) -> _End | None:
        """The first end among the ids, stop strings aside; of two at one token a stop goes before a length."""
        room = self.max_num_tokens - self._num_prompt_tokens - self._num_output_tokens
        if not self._stop_token_ids.isdisjoint(token_ids):
            first = max(self._params.min_tokens - self._num_output_tokens, 0)
            for index in range(first, min(room, len(token_ids))):
                if token_ids[index] in self._stop_token_ids:
                    own = token_ids[index] in self._params.stop_token_ids
                    return _End(index, "stop", token_ids[index] if own else None)
        return _End(room - 1, "length") if room <= len(token_ids) else None

    def _plain_text(self, token_ids: list[int], finished: bool) -> str:
        assert self._detokenizer is not None
        text = "".join(self._detokenizer.push(token_ids))
        return text + self._detokenizer.flush() if finished else text

    def _stoppable_text(self, token_ids: list[int], finished: bool) -> tuple[str, str | None, int]:
        """Text up to the first stop string, that string if one fired, and the number of tokens to its end."""
        assert self._detokenizer is not None
        assert self._stop_strings is not None
        pieces = self._detokenizer.push(token_ids)
        if finished:
            pieces.append(self._detokenizer.flush())
        # Within the first `min_tokens - 1` tokens a stop string is text like any other.
        num_free = min(max(self._params.min_tokens - 1 - self._num_output_tokens, 0), len(pieces))
        text = self._stop_strings.push("".join(pieces[:num_free]))
        rest = "".join(pieces[num_free:])
        found = self._stop_strings.find(rest)
        if found is None:
            text += self._stop_strings.push(rest)
            return (text + self._stop_strings.flush() if finished else text), None, len(token_ids)
        text += found.text_before
        if self._params.include_stop_str_in_output:
            text += found.stop
        num_scanned, num_chars = num_free, 0
        while num_chars < found.end:
            num_chars += len(pieces[num_scanned])
            num_scanned += 1
        return text, found.stop, min(num_scanned, len(token_ids))


@dataclass(frozen=True, slots=True)
class FoundStop:
    """The first stop string in a text: what may leave before it, and where in the new part it ends."""

    stop: str
    text_before: str
    end: int


class StopStrings:
    """Looks for stop strings in text that comes in pieces; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._held = ""  # the longest end of the text so far that begins a stop string

    def find(self, text: str) -> FoundStop | None:
        """The stop string that `text`, which comes next, completes first; of equal ends the longest."""
        if not text:
            return None
        num_held, whole = len(self._held), self._held + text
        ends = []
        for stop in self._stops:
            start = whole.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), -len(stop), stop))
        if not ends:
            return None
        end, _, stop = min(ends)
        return FoundStop(stop, whole[: end - len(stop)], end - num_held)

    def push(self, text: str) -> str:
        """Takes the next text, stop strings in it or not; what may leave."""
        if not text:
            return ""
        text = self._held + text
        start = self._possible_start(text)
        self._held = text[start:]
        return text[:start]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _possible_start(self, text: str) -> int:
        """Where the longest end of `text` that begins a stop string starts; its length where none does."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), earliest)
            while start >= 0 and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1, earliest)
            if start >= 0:
                earliest = start
        return earliest
