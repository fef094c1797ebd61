"""What a request for a generation goes through before its response begins."""

import time
from uuid import uuid4

from fastapi import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from app.api.api_key import owner_of
from app.api.chat import ChatFormat
from app.api.completions import CompletionFormat, EchoedPrompt
from app.api.delta_streams import Deltas, merge, with_prompt_logprobs_first, with_refusals, without_answer
from app.api.engine_client import EngineClient
from app.api.errors import APIError
from app.api.generation import chat_sampling_params, check_prompt_ids, completion_sampling_params
from app.api.generation_response import GenerationResponse
from app.api.model_card import ModelCard
from app.api.prompts import PromptEncoder
from app.api.protocol import ChatCompletionRequest, CompletionRequest, GenerationBody
from app.api.request_id import request_id_of
from app.api.responder import ChoiceFormat, Responder, ResponseOptions
from app.api.responses import Envelope
from app.api.token_texts import TokenTexts
from app.api.validation import parse_body
from app.engine.outputs import GenerationRequest
from app.engine.sampling_params import SamplingParams

MAX_BODY_BYTES = 16 * 2**20


class GenerationEndpoints:
    """Chat and plain completions over one engine.

    Both raise APIError for what the client got wrong, before the engine hears of the request.
    """

    def __init__(self, client: EngineClient, card: ModelCard, tokenizer: PreTrainedTokenizerBase) -> None:
        self._client = client
        self._card = card
        self._encoder = PromptEncoder(tokenizer, card.max_model_len)
        self._token_texts = TokenTexts(tokenizer)

    async def chat(self, http_request: Request) -> Response:
        """POST /v1/chat/completions."""
        request = parse_body(ChatCompletionRequest, await _read_body(http_request))
        self._card.model(request.model)
        prompt = await self._encoder.encode_chat(request)
        bad_words = await self._encoder.encode_words(request.bad_words)
        params = chat_sampling_params(request, len(prompt), bad_words, self._card)
        envelope = Envelope(f"chatcmpl-{request_id_of(http_request)}", int(time.time()), request.model)
        choice_format = ChatFormat(request, envelope, self._token_texts)
        return self._respond(http_request, request, [prompt], [params], choice_format, envelope.id)

    async def completions(self, http_request: Request) -> Response:
        """POST /v1/completions."""
        request = parse_body(CompletionRequest, await _read_body(http_request))
        self._card.model(request.model)
        bad_words = await self._encoder.encode_words(request.bad_words)
        prompts = await self._encode_prompts(request)
        params = [completion_sampling_params(request, len(prompt), bad_words, self._card) for prompt in prompts]
        envelope = Envelope(f"cmpl-{request_id_of(http_request)}", int(time.time()), request.model)
        choice_format = CompletionFormat(request, envelope, self._token_texts, self._echoed(request, prompts))
        drops_answer = request.max_tokens == 0
        return self._respond(http_request, request, prompts, params, choice_format, envelope.id, drops_answer)

    def _respond(
        self,
        http_request: Request,
        request: GenerationBody,
        prompts: list[list[int]],
        params: list[SamplingParams],
        choice_format: ChoiceFormat,
        response_id: str,
        drops_answer: bool = False,
    ) -> GenerationResponse:
        # Two requests may carry the same X-Request-Id (a retry, a careless client): the engine's must differ.
        unique_id, owner = f"{response_id}-{uuid4().hex[:8]}", owner_of(http_request)
        streams = [
            self._deltas(
                GenerationRequest(f"{unique_id}-{i}", prompt, params[i], request.n, request.stream, owner), drops_answer
            )
            for i, prompt in enumerate(prompts)
        ]
        options = ResponseOptions(
            n=request.n,
            include_usage=request.include_usage,
            include_speculation_metrics=request.include_speculation_metrics,
            sends_tokens=params[0].logprobs is not None or request.return_token_ids,
        )
        responder = Responder(choice_format, [len(prompt) for prompt in prompts], options)
        request_id = request_id_of(http_request)
        return GenerationResponse(merge(streams), responder, stream=request.stream, request_id=request_id)

    def _deltas(self, request: GenerationRequest, drops_answer: bool) -> Deltas:
        stream = with_refusals(self._client.generate(request))
        if request.sampling_params.prompt_logprobs is not None:
            stream = with_prompt_logprobs_first(stream)
        return without_answer(stream) if drops_answer else stream

    async def _encode_prompts(self, request: CompletionRequest) -> list[list[int]]:
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if texts:  # then all of them are
            return await self._encoder.encode_texts(texts, request.add_special_tokens)
        prompts = [prompt for prompt in request.prompts if not isinstance(prompt, str)]
        for prompt in prompts:
            check_prompt_ids(prompt, self._card.vocab_size)
        return prompts

    def _echoed(self, request: CompletionRequest, prompts: list[list[int]]) -> list[EchoedPrompt]:
        if not request.echo:
            return []
        return [
            EchoedPrompt(given, token_ids, is_text=True)
            if isinstance(given, str)
            else EchoedPrompt(self._encoder.decode(token_ids, request.skip_special_tokens), token_ids, is_text=False)
            for given, token_ids in zip(request.prompts, prompts, strict=True)
        ]


async def _read_body(http_request: Request) -> bytes:
    """Raises APIError 413 above the limit, before the rest is read."""
    body = bytearray()
    async for part in http_request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            message = f"The body of your request is longer than {MAX_BODY_BYTES} bytes."
            raise APIError(413, message, code="request_too_large")
    return bytes(body)
