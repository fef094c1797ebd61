"""The routes, and the application that holds them."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from openai.types import Model
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from transformers import PreTrainedTokenizerBase

from app.api.endpoints import GenerationEndpoints
from app.api.engine_client import EngineClient
from app.api.errors import APIError, EngineUnavailableError, as_api_error
from app.api.model_card import ModelCard
from app.api.protocol import ChatCompletionRequest, CompletionRequest
from app.api.request_id import RequestIdMiddleware, request_id_of

_PLAYGROUND = Path(__file__).with_name("playground.html")


def build_app(
    client: EngineClient, card: ModelCard, tokenizer: PreTrainedTokenizerBase, *, echo_request_id: bool = True
) -> FastAPI:
    """OpenAI's API over one engine, and a page to try it with.

    `echo_request_id` false leaves X-Request-Id on responses to a server that writes it itself.
    """
    app = FastAPI(title="Forerun", redirect_slashes=False)
    app.add_middleware(RequestIdMiddleware, echo=echo_request_id)
    app.add_exception_handler(APIError, _answer_api_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    _add_generation_routes(app, GenerationEndpoints(client, card, tokenizer))
    _add_information_routes(app, client, card)
    return app


def _add_generation_routes(app: FastAPI, endpoints: GenerationEndpoints) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest))
    async def create_chat_completion(request: Request) -> Response:
        return await endpoints.chat(request)

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        return await endpoints.completions(request)


def _add_information_routes(app: FastAPI, client: EngineClient, card: ModelCard) -> None:
    playground = _PLAYGROUND.read_text(encoding="utf-8")

    @app.get("/v1/models")
    async def list_models() -> Response:
        return JSONResponse({"object": "list", "data": [_dump(model) for model in card.models()]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        return JSONResponse(_dump(card.model(name)))

    @app.get("/health")
    async def health(request: Request) -> Response:
        try:
            await client.check_health()
        except Exception as error:  # whatever it is, the answer is that nobody should be sent here
            raise as_api_error(EngineUnavailableError(str(error)), request_id_of(request)) from error
        return JSONResponse({"status": "ok"})

    @app.get("/", include_in_schema=False)
    async def show_playground() -> Response:
        return HTMLResponse(playground)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """The router's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.url.path}"
    message = {404: f"Unknown request URL: {target}.", 405: f"Not allowed: {target}."}.get(
        error.status_code, str(error.detail)
    )
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return APIError(error.status_code, message, code=code, headers=error.headers).response()


def _body_of(request_type: type[BaseModel]) -> dict[str, Any]:
    """The schema of a body that the endpoint reads by itself."""
    schema = request_type.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs"))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """References resolved in place: theirs are to the root of a schema, which here is inside a document."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def _dump(model: Model) -> dict[str, Any]:
    return model.model_dump(exclude_unset=True)
