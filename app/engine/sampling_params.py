"""How a request wants its tokens drawn, and when it wants them to end."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are arg-max, in sampler, verifier and drafter alike."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with OpenAI's and vLLM's names and defaults.

    `top_k` 0 and `min_p` 0 are off. `seed` None draws one at admission. `logprobs` n returns the
    logprob of each token with the n most likely beside it (0: the token alone), judged before any
    processing; `prompt_logprobs` likewise for the prompt. `num_speculative_tokens` None is the
    server's number, 0 none; never more than the server's.

    Raises ValueError naming the field, the value and the remedy.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    max_tokens: int | None = None  # None: as many as the context holds
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: {remedy}")

        finite = math.isfinite
        require(finite(self.temperature) and self.temperature >= 0, "temperature", "use a number of 0 (greedy) or more")
        require(0 < self.top_p <= 1, "top_p", "use a number above 0 and up to 1")
        require(self.top_k >= 0, "top_k", "use 0 (off) or a positive number of tokens")
        require(0 <= self.min_p <= 1, "min_p", "use a number from 0 to 1")
        require(-2 <= self.presence_penalty <= 2, "presence_penalty", "use a number from -2 to 2")
        require(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "use a number from -2 to 2")
        require(
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "use a number above 0 (1 is off)",
        )
        require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "use a 64-bit integer")
        require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "use 1 or more")
        require(self.min_tokens >= 0, "min_tokens", "use 0 or more")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"use at most max_tokens, {self.max_tokens}",
        )
        require(all(self.stop), "stop", "a stop string must not be empty")
        require(self.logprobs is None or self.logprobs >= 0, "logprobs", "use 0 or more")
        require(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "use 0 or more")
        require(
            self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
            "num_speculative_tokens",
            "use 0 (off) or more",
        )
        for token_id, bias in self.logit_bias.items():
            if not (finite(bias) and -100 <= bias <= 100):
                raise ValueError(f"logit_bias[{token_id}] is {bias!r}: use a number from -100 to 100")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def check_token_ids(self, vocab_size: int) -> None:
        """Raises ValueError for a token id that the model does not have."""
        named = [("logit_bias", i) for i in self.logit_bias]
        named += [("stop_token_ids", i) for i in self.stop_token_ids]
        named += [("bad_words", i) for word in self.bad_words_token_ids for i in word]
        for name, token_id in named:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} names token {token_id}: the model's ids are 0 to {vocab_size - 1}")
