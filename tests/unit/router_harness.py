"""A small text model, a worker that does what the test says, and a router between them, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.inference.v1 import inference_pb2_grpc
from glmserve.service.grpc_server import GrpcServer, start_server
from glmserve.service.telemetry import Telemetry
from router.config import RouterConfig
from router.model import TextModel
from router.server import Router
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import TextTokenizer

ENGINE = "glmserve.engine.v1.EngineService"
MAX_CONTEXT = 64
EOS = 0
CORPUS = [
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog. 0123456789",
    "日本語のテキスト 你好世界 привет мир café naïve 🙂🙃 👩‍👩‍👧‍👦",
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if messages[0].content == 'refuse me' %}{{ raise_exception('not this one') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>"]


@functools.cache
def raw_tokenizer() -> Tokenizer:
    """Byte-level BPE as GLM's: every byte has an id; <|endoftext|> is 0; "<think>" is added but no control token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


# Ids beyond the tokeniser's, as in checkpoints whose embedding is padded.
VOCAB_SIZE = raw_tokenizer().get_vocab_size() + 8


@functools.cache
def text_model() -> TextModel:
    tokenizer = TextTokenizer(Tokenizer.from_str(raw_tokenizer().to_str()), VOCAB_SIZE)
    return TextModel.of(tokenizer, ChatTemplate(TEMPLATE, {}), {})


def encode(text: str) -> list[int]:
    ids: list[int] = raw_tokenizer().encode(text).ids
    return ids


def byte_ids(data: bytes) -> list[int]:
    """One id for each byte."""
    table = text_model().tokenizer.token_bytes
    return [table.index(bytes((byte,))) for byte in data]


def write_model(directory: Path, **changes: Any) -> Path:
    """A model directory; `changes` replace whole files: JSON values, or None for no such file."""
    files: dict[str, Any] = {
        "config.json": {"vocab_size": VOCAB_SIZE},
        "tokenizer.json": json.loads(raw_tokenizer().to_str()),
        "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"},
        "generation_config.json": {"temperature": 0.7, "top_p": 0.9},
    }
    files.update({name.replace("__", "."): value for name, value in changes.items()})
    for name, value in files.items():
        if value is not None:
            (directory / name).write_text(json.dumps(value), encoding="utf-8")
    return directory


class ScriptedWorker(engine_pb2_grpc.EngineServiceServicer):
    """The worker's side of engine.proto. It queues what it is sent and sends what the test gives it.

    With `answer` set, each submit is answered at once by the responses that it returns.
    """

    def __init__(self) -> None:
        self.info = engine_pb2.GetInfoResponse(
            model_name="tiny", model_revision="r1", vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT, eos_token_ids=[EOS]
        )
        self.info.prompt_logprobs = True
        self.answer: Callable[[engine_pb2.Submit], Sequence[engine_pb2.ServeResponse]] | None = None
        self.submits: asyncio.Queue[engine_pb2.Submit] = asyncio.Queue()
        self.aborts: asyncio.Queue[int] = asyncio.Queue()
        self.seen: set[int] = set()
        self.connected = asyncio.Event()
        self.credit = 0
        self.load_polls: asyncio.Queue[None] = asyncio.Queue()
        self.answers_load = True
        self._responses: asyncio.Queue[engine_pb2.ServeResponse | None] = asyncio.Queue()

    def send(self, *responses: engine_pb2.ServeResponse) -> None:
        for response in responses:
            self._responses.put_nowait(response)

    def tokens(self, request_id: int, ids: Sequence[int]) -> None:
        self.send(step(request_id, ids))

    def finish(self, request_id: int, ids: Sequence[int] = (), reason: str = "LENGTH", **fields: Any) -> None:
        self.send(step(request_id, ids, reason, **fields))

    def end_stream(self) -> None:
        self._responses.put_nowait(None)

    async def Serve(
        self, requests: AsyncIterator[engine_pb2.ServeRequest], context: Any
    ) -> AsyncIterator[engine_pb2.ServeResponse]:
        self._responses = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests))
        context.add_done_callback(lambda _context: reader.cancel())
        yield engine_pb2.ServeResponse(load=engine_pb2.Load())
        self.connected.set()
        while (response := await self._responses.get()) is not None:
            yield response

    async def GetInfo(self, request: engine_pb2.GetInfoRequest, context: Any) -> engine_pb2.GetInfoResponse:
        return self.info

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Any) -> engine_pb2.GetLoadResponse:
        self.load_polls.put_nowait(None)
        if not self.answers_load:
            await asyncio.Event().wait()
        return engine_pb2.GetLoadResponse(load=engine_pb2.Load())

    async def _read(self, requests: AsyncIterator[engine_pb2.ServeRequest]) -> None:
        async for request in requests:
            self.credit += request.credit
            for submit in request.submits:
                self.submits.put_nowait(submit)
                self.seen.add(submit.request_id)
                if self.answer is not None:
                    self.send(*self.answer(submit))
            for request_id in request.abort_request_ids:
                self.aborts.put_nowait(request_id)


def step(request_id: int, ids: Sequence[int], reason: str | None = None, **fields: Any) -> engine_pb2.ServeResponse:
    """One response: new ids of a request and, with `reason`, its finish."""
    response = engine_pb2.ServeResponse()
    if ids:
        response.outputs.add(request_id=request_id, token_ids=ids)
    if reason is not None:
        response.finishes.add(request_id=request_id, reason=f"FINISH_REASON_{reason}", **fields)
    return response


@dataclass
class Bench:
    """A router whose worker is `worker`."""

    worker: ScriptedWorker
    worker_server: GrpcServer
    router: Router
    channel: grpc.aio.Channel

    @property
    def client(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def wait_health(self, serving: bool) -> None:
        """Until the router reports this health."""
        await wait_health(self.channel, serving)

    async def stop_worker(self) -> None:
        await self.worker_server.server.stop(None)

    async def start_worker(self) -> None:
        """Again, at the same address."""
        self.worker_server = await start_worker(self.worker, self.worker_server.address)


async def wait_health(channel: grpc.aio.Channel, serving: bool, service: str = "") -> None:
    """Until the server reports this health of `service`."""
    wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    client: Any = health_pb2_grpc.HealthStub(channel)
    call = client.Watch(health_pb2.HealthCheckRequest(service=service))
    async for response in call:
        if response.status == wanted:
            break
    call.cancel()


async def start_worker(worker: ScriptedWorker, listen: str = "127.0.0.1:0") -> GrpcServer:
    started = await start_server(
        lambda server: engine_pb2_grpc.add_EngineServiceServicer_to_server(worker, server), (ENGINE,), listen, 64 << 20
    )
    await started.set_serving(True)
    return started


@contextlib.asynccontextmanager
async def running_worker(worker: ScriptedWorker) -> AsyncIterator[str]:
    """Its address."""
    started = await start_worker(worker)
    try:
        yield started.address
    finally:
        await started.server.stop(None)


# A fixed, small flow control window: a client that does not read is felt after 64 KiB.
_CLIENT_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1 << 16),
)


@contextlib.asynccontextmanager
async def bench(
    model: TextModel | None = None,
    telemetry: Telemetry | None = None,
    max_context: int = MAX_CONTEXT,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """A scripted worker, a router that serves, and a client's channel to it."""
    worker = ScriptedWorker()
    worker.info.vocab_size = (model or text_model()).vocab_size
    worker.info.max_context = max_context
    worker_server = await start_worker(worker)
    config = RouterConfig(model=Path("unused"), worker=worker_server.address, **{"listen": "127.0.0.1:0", **settings})
    router = await Router.start(config, model or text_model(), telemetry or Telemetry())
    async with grpc.aio.insecure_channel(router.address, options=_CLIENT_OPTIONS) as channel:
        made = Bench(worker, worker_server, router, channel)
        try:
            await made.wait_health(True)
            yield made
        finally:
            await router.stop()
            await made.worker_server.server.stop(None)
