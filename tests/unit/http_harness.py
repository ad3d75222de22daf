"""A router with a scripted worker, and the clients that people use for its HTTP front."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import openai

from glmserve.engine.v1 import engine_pb2
from glmserve.service.telemetry import Telemetry
from router.model import TextModel
from tests.unit.router_harness import Bench, ScriptedWorker, bench, step

HELLO: list[Any] = [{"role": "user", "content": "Hi"}]


@dataclass
class Front:
    """The front of `bench`, by raw HTTP and through both official clients, which do not try again."""

    bench: Bench
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    @property
    def worker(self) -> ScriptedWorker:
        return self.bench.worker

    def answer(self, *chunks: list[int], reason: str = "LENGTH", **fields: Any) -> None:
        """The worker answers each request with these ids, a step each, and finishes with the last."""

        def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
            *head, last = chunks
            return [step(submit.request_id, ids) for ids in head] + [step(submit.request_id, last, reason, **fields)]

        self.worker.answer = answer


@contextlib.asynccontextmanager
async def front(
    model: TextModel | None = None, telemetry: Telemetry | None = None, key: str = "none", **settings: Any
) -> AsyncIterator[Front]:
    """`key`: what the clients send."""
    async with bench(model, telemetry, **{"http_listen": "127.0.0.1:0", **settings}) as b:
        url = f"http://{b.router.http_address}"
        async with (
            httpx2.AsyncClient(base_url=url) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as first,
            anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as second,
        ):
            yield Front(b, http, first, second)
