"""The API over a scripted engine, with the clients to speak to it."""

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from app.api.model_card import ModelCard
from app.api.router import build_app
from tests.helpers.asgi_client import AsgiCall
from tests.helpers.scripted_client import Script, ScriptedClient
from tests.helpers.tiny_models import VOCAB_SIZE, write_tiny_tokenizer

CARD = ModelCard(("tiny", "tiny-alias/v1"), max_model_len=64, vocab_size=VOCAB_SIZE, created=1_700_000_000)


@lru_cache(maxsize=1)
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_tokenizer(Path(folder))
        return AutoTokenizer.from_pretrained(folder)


class ScriptedApi:
    """`app` over an engine that plays `script`."""

    def __init__(
        self,
        script: Script,
        *,
        card: ModelCard = CARD,
        health: BaseException | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.engine = ScriptedClient(script, health)
        self.tokenizer = tokenizer or tiny_tokenizer()
        self.app = build_app(self.engine, card, self.tokenizer)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://testserver")
        self.openai = AsyncOpenAI(base_url="http://testserver/v1", api_key="-", http_client=self.http, max_retries=0)

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
        """`body` as JSON, or as the bytes that it is."""
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, headers=headers)
        return await self.http.post(path, json=body, headers=headers)

    def call(self, path: str, body: Any) -> AsgiCall:
        """A POST whose chunks can be taken one by one."""
        return AsgiCall(self.app, "POST", path, body)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)
