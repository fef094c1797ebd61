"""The engine's logprobs in the three forms that clients know."""

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob

from app.api.responses import PromptLogprob, PromptLogprobs, TextLogprobs
from app.api.token_texts import TextOffsets, TokenTexts
from app.engine.plan import TokenLogprobs

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this in its place."""


def chat_logprobs(logprobs: list[TokenLogprobs], token_texts: TokenTexts) -> list[ChatCompletionTokenLogprob]:
    """One entry a token; `bytes` joined over tokens give the text where a character is split among them."""
    text_of, bytes_of = token_texts.text_of, token_texts.bytes_of
    return [
        ChatCompletionTokenLogprob(
            token=text_of(entry.token_id),
            bytes=list(bytes_of(entry.token_id)),
            logprob=_finite(entry.logprob),
            top_logprobs=[
                TopLogprob(token=text_of(token_id), bytes=list(bytes_of(token_id)), logprob=_finite(logprob))
                for token_id, logprob in entry.top
            ],
        )
        for entry in logprobs
    ]


def text_logprobs(
    prompt: list[int],  # echoed, with their logprobs; or empty
    prompt_logprobs: list[TokenLogprobs | None],  # [len(prompt)]
    prompt_offsets: list[int],  # [len(prompt)]
    logprobs: list[TokenLogprobs],
    offsets: TextOffsets,  # of the tokens that follow the prompt
    token_texts: TokenTexts,
) -> TextLogprobs:
    """Parallel lists, the echoed prompt's tokens first; offsets count from the start of the choice's text."""
    token_ids = [*prompt, *(entry.token_id for entry in logprobs)]
    entries: list[TokenLogprobs | None] = [*prompt_logprobs, *logprobs]
    return TextLogprobs(
        tokens=[_label(token_id, token_texts) for token_id in token_ids],
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
        top_logprobs=[None if entry is None else _top(entry, token_texts) for entry in entries],
        text_offset=[*prompt_offsets, *(offsets.advance(entry.token_id) for entry in logprobs)],
    )


def prompt_logprobs_by_id(prompt_logprobs: list[TokenLogprobs | None], token_texts: TokenTexts) -> PromptLogprobs:
    """vLLM's form: candidates by token id at each position, the prompt's own token among them."""
    positions: PromptLogprobs = []
    for entry in prompt_logprobs:
        if entry is None:
            positions.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(entry.top)]
        positions.append(
            {
                str(token_id): PromptLogprob(
                    logprob=_finite(logprob), rank=rank, decoded_token=token_texts.text_of(token_id)
                )
                for token_id, logprob, rank in ranked
            }
        )
    return positions


def _top(entry: TokenLogprobs, token_texts: TokenTexts) -> dict[str, float]:
    """By label; of two tokens with the same one the likelier stays. The token itself is always there."""
    top: dict[str, float] = {}
    for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
        top.setdefault(_label(token_id, token_texts), _finite(logprob))
    return top


def _label(token_id: int, token_texts: TokenTexts) -> str:
    text = token_texts.text_of(token_id)
    return text if token_texts.is_whole(token_id) else f"bytes:{text}"


def _finite(logprob: float) -> float:
    return max(float(logprob), _LEAST_LOGPROB)
