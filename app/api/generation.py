"""From a request's body to what the engine is asked."""

from app.api.errors import APIError, context_length_error, refusal
from app.api.model_card import ModelCard
from app.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from app.engine.sampling_params import SamplingParams


def chat_sampling_params(
    request: ChatCompletionRequest, num_prompt_tokens: int, bad_words: list[list[int]], card: ModelCard
) -> SamplingParams:
    """Without a limit the answer may fill the context.

    Raises APIError naming the field at fault.
    """
    max_tokens = request.max_new_tokens
    check_context(num_prompt_tokens, max_tokens or 1, card.max_model_len, "messages")
    return _sampling_params(request, max_tokens, request.num_logprobs, request.prompt_logprobs, bad_words, card)


def completion_sampling_params(
    request: CompletionRequest, num_prompt_tokens: int, bad_words: list[list[int]], card: ModelCard
) -> SamplingParams:
    """OpenAI's 16 tokens without a limit, or what the context has left; one where none is asked for.

    Raises APIError naming the field at fault.
    """
    max_tokens = max(request.max_tokens, 1)
    if "max_tokens" not in request.model_fields_set:
        max_tokens = max(min(max_tokens, card.max_model_len - num_prompt_tokens), 1)
    check_context(num_prompt_tokens, max_tokens, card.max_model_len, "prompt")
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, request.logprobs)
    return _sampling_params(request, max_tokens, request.logprobs, prompt_logprobs, bad_words, card)


def check_context(num_prompt_tokens: int, num_new_tokens: int, max_model_len: int, param: str) -> None:
    """Raises APIError where prompt and answer do not fit together."""
    num_new_tokens = max(num_new_tokens, 1)
    if num_prompt_tokens + num_new_tokens > max_model_len:
        raise context_length_error(num_prompt_tokens, num_new_tokens, max_model_len, param)


def check_prompt_ids(token_ids: list[int], vocab_size: int) -> None:
    """Raises APIError for an id that the model does not have."""
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < vocab_size:
            message = f"'prompt' has token {token_id}: the model's ids are 0 to {vocab_size - 1}."
            raise APIError(400, message, param="prompt")


def _sampling_params(
    request: GenerationBody,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: list[list[int]],
    card: ModelCard,
) -> SamplingParams:
    try:
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=max(request.top_k, 0),
            min_p=request.min_p,
            seed=request.seed,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=_logit_bias(request.logit_bias),
            bad_words_token_ids=bad_words,
            min_tokens=request.min_tokens,
            max_tokens=max_tokens,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            include_stop_str_in_output=request.include_stop_str_in_output,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_speculative_tokens=request.num_speculative_tokens,
        )
        params.check_token_ids(card.vocab_size)
    except ValueError as error:
        refused = refusal(error)
        if refused.param == "max_tokens" and "max_completion_tokens" in request.model_fields_set:
            renamed = str(error).replace("max_tokens", "max_completion_tokens", 1)
            refused = APIError(400, renamed, param="max_completion_tokens")
        raise refused from None
    return params


def _logit_bias(by_name: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; these must be token ids."""
    by_id: dict[int, float] = {}
    for name, bias in by_name.items():
        digits = name.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 20):
            quoted = name if len(name) < 80 else name[:79] + "…"
            raise ValueError(f"logit_bias names {quoted!r}: its keys are token ids, such as '1234'")
        by_id[int(name)] = bias
    return by_id
