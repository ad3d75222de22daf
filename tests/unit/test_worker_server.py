"""Start-up, drain and failure of the worker process, on the scripted engine; and what a wrong setting gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_worker import loading, server
from engine_worker.config import WorkerConfig
from engine_worker.errors import DeviceError, EngineFailedError
from engine_worker.models import Parallelism
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.layout import Layout
from engine_worker.plan.record import KvCache
from engine_worker.runtime import ranks
from engine_worker.runtime.records import EngineInfo, EngineOptions, EngineProgress
from engine_worker.service import SERVICE_NAME
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service.grpc_server import LIVENESS
from tests.unit.router_harness import wait_health
from tests.unit.scripted_engine import VOCAB, ScriptedEngine
from tests.unit.worker_harness import EOS, Stream, submit

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class NativeLikeEngine(ScriptedEngine):
    """With what the process needs beside steps."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options.num_pages, 16)
        self.options = options
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()
        self.aborted: str | None = None

    def progress(self) -> EngineProgress:
        """As ranks whose second one hangs while the gate is closed."""
        where = "" if self.gate.is_set() else "rank 1 in op linear layers.0.attn.o of step 7; rank 0 in op all_reduce"
        return EngineProgress(len(self.steps), where)

    def abort(self, reason: str) -> None:
        self.aborted = reason
        self.gate.set()

    def wait(self) -> None:
        """For the gate, or the abort."""
        assert self.gate.wait(30)
        if self.aborted:
            raise DeviceError(self.aborted)

    def __enter__(self) -> NativeLikeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def info(self) -> EngineInfo:
        return EngineInfo(
            kernels="cpu",
            device="scripted",
            weight_bytes_mapped=10,
            weight_bytes_copied=1,
            kv_bytes=5,
            scratch_bytes=1,
            num_pages=self.options.num_pages,
            max_slots=self.options.max_slots,
            max_context=self.options.max_context,
            vocab=VOCAB,
            steps_run=len(self.steps),
        )


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[NativeLikeEngine]:
    """Puts a scripted model and engine in place of the native ones; every engine that is made."""
    made: list[NativeLikeEngine] = []

    def create(options: EngineOptions) -> NativeLikeEngine:
        engine = NativeLikeEngine(options)
        engine.before_collect = lambda step: engine.wait()
        made.append(engine)
        return engine

    plan = SimpleNamespace(kv=KvCache(layers=1, kv_heads=1, head_dim=8, dtype="bf16"), operands=(), placements=())
    config = SimpleNamespace(
        max_position_embeddings=512,
        eos_token_ids=(EOS,),
        first_k_dense_replace=1,
        num_hidden_layers=1,
        n_routed_experts=0,
    )

    def build_model(
        directory: Path, kv_dtype: str, parallelism: Parallelism, synthetic_seed: int | None, exchanges: Exchanges
    ) -> SimpleNamespace:
        assert exchanges == REPLICATED
        layouts = [Layout(parallelism.tp, 1, rank) for rank in range(parallelism.tp)]
        made_ranks = [SimpleNamespace(layout=layout, mixed=plan, decode=plan) for layout in layouts]
        return SimpleNamespace(config=config, mixed=plan, decode=plan, ranks=made_ranks, tensors=(), revision="abc")

    monkeypatch.setattr(loading, "build_model", build_model)
    monkeypatch.setattr(ranks, "dump", lambda plan: "")
    monkeypatch.setattr(loading, "Engine", SimpleNamespace(create=create))
    return made


def worker_config(tmp_path: Path, **values: Any) -> WorkerConfig:
    settings: dict[str, Any] = {"max_running": 4, "step_tokens": 32, "kv_memory_mb": 1, **values}
    return WorkerConfig(model=tmp_path / "glm-test", listen="127.0.0.1:0", ready_file=tmp_path / "ready", **settings)


@contextlib.asynccontextmanager
async def serving(config: WorkerConfig) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    """The worker as a task, from the moment it serves."""
    async with listening(config) as (task, channel):
        await wait_health(channel, True, SERVICE_NAME)
        yield task, channel
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def listening(config: WorkerConfig) -> AsyncIterator[tuple[asyncio.Task[None], grpc.aio.Channel]]:
    """The worker as a task, from the moment its ready file is there."""
    task = asyncio.create_task(server._run(config))
    assert config.ready_file is not None
    while not config.ready_file.exists():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.005)
    ready = json.loads(config.ready_file.read_text())
    assert ready["pid"] == os.getpid()
    async with grpc.aio.insecure_channel(ready["address"]) as channel:
        yield task, channel


async def health(channel: grpc.aio.Channel, name: str = SERVICE_NAME) -> int:
    client: Any = health_pb2_grpc.HealthStub(channel)
    status: int = (await client.Check(health_pb2.HealthCheckRequest(service=name))).status
    return status


async def open_stream(channel: grpc.aio.Channel) -> Stream:
    stream = Stream(engine_pb2_grpc.EngineServiceStub(channel).Serve())
    await stream.read()
    await stream.send(credit=1000)
    return stream


async def until_running(channel: grpc.aio.Channel) -> None:
    """Until a request has reached the scheduler: polled, because nothing announces it."""
    client = engine_pb2_grpc.EngineServiceStub(channel)
    while not (await client.GetLoad(engine_pb2.GetLoadRequest())).load.running_requests:
        pass


async def test_serves_after_a_real_warm_up_and_stops_on_a_signal(
    engines: list[NativeLikeEngine], tmp_path: Path
) -> None:
    async with serving(worker_config(tmp_path)) as (task, channel):
        assert len(engines[0].steps) == 4, "the warm-up generation"
        assert await health(channel) == SERVING
        info = await engine_pb2_grpc.EngineServiceStub(channel).GetInfo(engine_pb2.GetInfoRequest())
        assert (info.model_name, info.model_revision, info.vocab_size) == ("glm-test", "abc", VOCAB)
        assert (info.max_context, info.max_running_requests, info.page_size) == (512, 4, 16)
        assert info.total_pages == 2**20 // (16 * 2 * 8 * 2)
        stream = await open_stream(channel)
        await stream.send(submit(1, [1, 2], 5))
        assert len((await stream.end_of(1)).token_ids) == 5
    assert task.exception() is None
    assert engines[0].closed
    assert engines[0].uncollected == 0


@pytest.fixture
def weights(engines: list[NativeLikeEngine], monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Loading stops at two fifths of the weights until this is set."""
    create, loaded = vars(loading)["Engine"].create, threading.Event()

    def slowly(options: EngineOptions) -> Any:
        assert options.progress is not None
        options.progress(49, 100)
        assert loaded.wait(30)
        return create(options)

    monkeypatch.setattr(loading, "Engine", SimpleNamespace(create=slowly))
    return loaded


async def test_while_it_loads_it_is_alive_and_not_ready_and_says_how_far_it_is(
    weights: threading.Event, tmp_path: Path
) -> None:
    async with listening(worker_config(tmp_path)) as (task, channel):
        client = engine_pb2_grpc.EngineServiceStub(channel)
        told: set[str | None] = set()
        while "it loads the weights, 40 % done" not in told:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.GetLoad(engine_pb2.GetLoadRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            told.add(caught.value.details())
        assert (await health(channel), await health(channel, "")) == (NOT_SERVING, NOT_SERVING)
        assert await health(channel, LIVENESS) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.GetInfo(engine_pb2.GetInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await client.Serve().code() is grpc.StatusCode.UNAVAILABLE
        weights.set()
        await wait_health(channel, True, SERVICE_NAME)
        assert (await client.GetInfo(engine_pb2.GetInfoRequest())).vocab_size == VOCAB
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([task])
    assert task.exception() is None


async def test_a_stop_while_it_loads_is_at_once(
    weights: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(os, "_exit", left.set_result)
    async with listening(worker_config(tmp_path)) as (task, channel):
        os.kill(os.getpid(), signal.SIGTERM)
        assert await left == 0
        weights.set()
        await wait_health(channel, True, SERVICE_NAME)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([task])


async def test_sigterm_finishes_what_runs_and_refuses_what_comes(
    engines: list[NativeLikeEngine], tmp_path: Path
) -> None:
    async with serving(worker_config(tmp_path)) as (task, channel):
        engines[0].gate.clear()
        stream = await open_stream(channel)
        await stream.send(submit(1, [1, 2], 5))
        await until_running(channel)
        os.kill(os.getpid(), signal.SIGTERM)
        while await health(channel) == SERVING:
            pass
        await stream.send(submit(2, [1, 2], 5))
        rejection = (await stream.end_of(2)).rejection
        assert rejection is not None
        assert rejection.reason == engine_pb2.REJECTION_REASON_UNAVAILABLE
        engines[0].gate.set()
        assert len((await stream.end_of(1)).token_ids) == 5
        assert await stream.call.read() is grpc.aio.EOF
        assert await stream.call.code() == grpc.StatusCode.OK
    assert task.exception() is None


async def test_after_the_drain_limit_requests_end_unavailable(engines: list[NativeLikeEngine], tmp_path: Path) -> None:
    async with serving(worker_config(tmp_path, drain_seconds=0)) as (task, channel):
        engines[0].gate.clear()
        stream = await open_stream(channel)
        await stream.send(submit(1, [1, 2], 300))
        await until_running(channel)
        os.kill(os.getpid(), signal.SIGTERM)
        while await health(channel) == SERVING:
            pass
        engines[0].gate.set()
        finish = (await stream.end_of(1)).finish
        assert finish is not None
        assert finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE
    assert task.exception() is None


async def test_engine_failure_ends_the_process_with_its_reason(engines: list[NativeLikeEngine], tmp_path: Path) -> None:
    async with serving(worker_config(tmp_path)) as (task, channel):

        def fail(step: int) -> None:
            raise DeviceError("layers.2.attn: device lost")

        engines[0].before_collect = fail
        stream = await open_stream(channel)
        await stream.send(submit(1, [1, 2], 5))
        finish = (await stream.end_of(1)).finish
        assert finish is not None
        assert finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE
        with contextlib.suppress(EngineFailedError):
            await task
    assert isinstance(task.exception(), EngineFailedError)
    assert str(task.exception()) == "layers.2.attn: device lost"


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` sets up the process's log and interpreter; a test's process keeps its own."""
    monkeypatch.setattr("glmserve.service.logs.configure", lambda service, level: None)
    monkeypatch.setattr("sys.setswitchinterval", lambda seconds: None)
    for name in [name for name in os.environ if name.startswith("GLM_WORKER_")]:
        monkeypatch.delenv(name)
    yield


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "model: Field required"),
        (
            ["--model", "x", "--max-running", "0"],
            "max_running: Input should be greater than or equal to 1 (given: '0')",
        ),
        (["--model", "x", "--listen", "nowhere"], "listen: String should match pattern"),
        (["--model", "x", "--max-context", "100"], "max_context: Input should be a multiple of 16 (given: '100')"),
        (["--model", "x", "--kv-dtype", "int4"], "kv_dtype: Input should be 'auto', 'f32', 'bf16' or 'fp8'"),
        (["--model", "x", "--step-tokens", "64"], "step_tokens (64) must be more than max_running (64)"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--model", "x", "--tls-cert", "no/cert", "--tls-key", "no/key"], "cannot read no/cert: No such file"),
        (["--model", "x", "--listen", "0.0.0.0:0"], "listen: 0.0.0.0:0 is not loopback"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert server.main(arguments) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("glm worker: error: ")
    assert text in lines[0]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--max-context", "1024"], "max_context: 1024, the model's own is 512"),
        (["--listen", "IN_USE"], "cannot listen on"),
    ],
)
def test_what_only_the_model_or_the_machine_can_tell(
    engines: list[NativeLikeEngine], arguments: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = [address if value == "IN_USE" else value for value in arguments]
        assert server.main(["--model", "x", "--kv-memory-mb", "1", *given]) == 2
    assert text in capfd.readouterr().err.splitlines()[-1]
    assert all(engine.closed for engine in engines)


@pytest.mark.parametrize(
    ("settings", "report"),
    [
        ({"step_timeout_seconds": 0.2}, "the engine is stuck: a step has not ended for 0.2"),
        (
            {"tp": 2, "stall_seconds": 0.2},
            "the engine is stuck: no rank has ended an operation for 0.2 s (stall_seconds): "
            "rank 1 in op linear layers.0.attn.o of step 7; rank 0 in op all_reduce",
        ),
    ],
)
async def test_a_stuck_engine_is_reported_dead_and_ends_the_process(
    engines: list[NativeLikeEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    report: str,
) -> None:
    left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(os, "_exit", left.set_result)
    async with serving(worker_config(tmp_path, **settings)) as (task, channel):
        watching: Any = health_pb2_grpc.HealthStub(channel)
        watch = watching.Watch(health_pb2.HealthCheckRequest(service="liveness"))
        assert (await watch.read()).status == SERVING
        engines[0].gate.clear()
        stream = await open_stream(channel)
        await stream.send(submit(1, [1, 2], 5))
        end = await stream.end_of(1)
        assert end.finish is not None and end.finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE
        assert end.finish.usage.prompt_tokens == 2
        assert await left == 1
        await asyncio.wait([task])
    assert report in capfd.readouterr().err
    assert engines[0].aborted is not None and engines[0].aborted.startswith(report)
