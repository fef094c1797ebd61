"""The bodies of requests: OpenAI's fields, and extensions with vLLM's names.

Numbers are judged by SamplingParams, so that the engine and its API agree; types are judged here, strictly.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from app.api.errors import APIError

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_PROMPTS = 2048


class _Body(BaseModel):
    """Strict types, no unknown fields; a null means that the field was left out."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_prompt(value: Any) -> Any:
    """One error for a union of four: pydantic would name each alternative."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("use a string, a list of strings, a list of token ids or a list of such lists, not empty")
    if all(isinstance(item, str) for item in value):
        return value
    if all(type(item) is int for item in value):
        return value
    for item in value:
        if not isinstance(item, list) or not item or not all(type(token_id) is int for token_id in item):
            raise ValueError("use strings only, token ids only or lists of token ids only, none of these lists empty")
    return value


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
StopStrings = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SpeculativeOptions(_Body):
    num_speculative_tokens: int | None = Field(None, description="Drafts a step, at most; 0 turns drafting off.")


class GenerationBody(_Body):
    """What chat and plain completions have in common.

    `without_effect` lists the fields that ask for something that this server lacks, with the values that
    ask for nothing.
    """

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] = {}
    stop: StopStrings = []
    user: str | None = None

    # Extensions.
    top_k: int = Field(0, ge=-1, description="0 and -1 are off.")
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    bad_words: list[str] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool = Field(False, description="Choices and chunks carry the ids of their tokens.")
    speculative: SpeculativeOptions | None = None
    include_speculation_metrics: bool = Field(
        False, description="The response, or the stream's last chunk, says what speculation did for it."
    )

    @property
    def num_speculative_tokens(self) -> int | None:
        return None if self.speculative is None else self.speculative.num_speculative_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises APIError for what types cannot say."""
        for name, neutral_values in self.without_effect.items():
            value = getattr(self, name)
            if value is not None and value not in neutral_values:
                raise APIError(400, f"'{name}' is not supported by this server: leave it out.", param=name)
        if self.stream_options is not None and not self.stream:
            raise APIError(
                400, "The 'stream_options' parameter is only allowed when 'stream' is enabled.", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            raise APIError(400, "'prompt_logprobs' is not available when 'stream' is enabled.", param="prompt_logprobs")


class TextPart(_Body):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None


def _text_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(_Body):
    """`content` parts are joined by newlines. The other fields are those that a client sends back with an answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], Field(min_length=1), BeforeValidator(_text_parts)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] = []
    annotations: Annotated[list[Any], Field(max_length=0)] = []

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationBody):
    """POST /v1/chat/completions."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    moderation: Any = None
    prediction: Any = None
    web_search_options: Any = None

    # Without a bearing on the answer of a server of one's own.
    metadata: dict[str, str] | None = None
    store: bool = False
    service_tier: str | None = None
    parallel_tool_calls: bool = False
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    # Variables of the chat template, where it knows them.
    reasoning_effort: str | None = None
    verbosity: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise APIError(
                400,
                "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
                param="max_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError(400, "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                message = "'continue_final_message' continues the last message, 'add_generation_prompt' begins another."
                raise APIError(400, f"{message} Use one of them.", param="continue_final_message")
            self.add_generation_prompt = False


class CompletionRequest(GenerationBody):
    """POST /v1/completions. Without a prompt the model begins a new document."""

    without_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    prompt: Prompt = ""
    max_tokens: int = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    suffix: Any = None
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One a completion, before `n`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.n:
            raise APIError(
                400, f"'best_of' is {self.best_of}: only n, {self.n}, is supported; leave it out.", param="best_of"
            )
        if len(self.prompts) > MAX_PROMPTS:
            raise APIError(400, f"'prompt' has {len(self.prompts)} prompts: use at most {MAX_PROMPTS}.", param="prompt")
