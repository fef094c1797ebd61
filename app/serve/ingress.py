"""The deployment that speaks HTTP: OpenAI's API in front of the replicas' handle. It holds no model."""

import asyncio
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.config import AppConfig
from app.serve.messages import ModelDescription
from app.serve.package_logs import log_with_serve
from app.serve.pending import watch_replicas
from app.serve.replica_client import ReplicaClient


@serve.ingress()
class Ingress:
    def __init__(self, target: DeploymentHandle, config: AppConfig) -> None:
        log_with_serve()
        self._target = target
        self._config = config
        self._watch: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """The application, once a replica has loaded its model and can say what that is."""
        # Imported here: the process that builds the application imports this module, and these take seconds.
        from app.api.model_card import ModelCard
        from app.api.router import build_app
        from models.tokenizer import load_tokenizer

        app_name, deployment_name = serve.get_replica_context().app_name, self._target.deployment_name
        self._watch = asyncio.create_task(watch_replicas(self._config, app_name, deployment_name))
        # A folder's tokenizer is read while the replica loads its weights; what is no folder yet, the replica fetches.
        folder = Path(self._config.model)
        tokenizer = await asyncio.to_thread(load_tokenizer, folder) if folder.is_dir() else None
        description: ModelDescription = await self._target.describe.remote()
        if tokenizer is None:
            tokenizer = await asyncio.to_thread(load_tokenizer, description.folder)
        card = ModelCard(
            served_model_names=(self._config.model_name,),
            max_model_len=description.max_model_len,
            vocab_size=description.vocab_size,
            created=int(time.time()),
        )
        client = ReplicaClient(self._target, self._config.retry_limit_s)
        app = build_app(client, card, tokenizer, echo_request_id=False)  # Serve's proxy writes X-Request-Id itself

        @app.get("/stats")
        async def stats() -> dict[str, Any]:
            """Queues, KV blocks, totals and speculation of every replica since its start."""
            return {"replicas": await client.stats()}

        return app
