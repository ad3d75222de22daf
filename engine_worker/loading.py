"""From settings to an engine that can step, while the port already tells how far that is."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import structlog

from engine_worker.config import Sizes, WorkerConfig, plan_sizes
from engine_worker.device import choose_device, on_gpu
from engine_worker.driver.compile import with_executor
from engine_worker.exchange_choice import choose_exchanges
from engine_worker.models import Model, RankPlans, build_model
from engine_worker.plan.memory import rank_memory
from engine_worker.plan.record import KvCache
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineInfo, EngineOptions, Progress
from engine_worker.service import Context, EngineService, ServeContext
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service.status import UnavailableError

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Loaded:
    """`engine` is the caller's to close."""

    model: Model
    sizes: Sizes
    engine: Engine
    info: EngineInfo


def load(config: WorkerConfig, progress: Progress) -> Loaded:
    """Takes as long as the weights take: not for an event loop. `progress(done, total)` counts their bytes.

    Raises WorkerError: settings, checkpoint, build or machine do not allow it.
    """
    device = choose_device(config.device, config.gpu, config.kernels)
    log.info("device", kernels=device.table, reason=device.reason)
    seed = config.synthetic_seed if config.weights == "synthetic" else None
    exchanges = choose_exchanges(config, device.table)
    model = build_model(config.model, config.kv_dtype, config.parallelism, seed, exchanges)
    sizes = plan_sizes(
        config,
        model.config.max_position_embeddings,
        shared_kv(model, device.table),
        device_memory=on_gpu(device.table),
    )
    log.info(
        "loading",
        model=str(config.model),
        weights=config.weights,
        revision=model.revision,
        max_context=sizes.max_context,
        kv_pages=sizes.num_pages,
    )
    for rank in model.ranks:
        _log_memory(config, rank, sizes)
    engine = Engine.create(engine_options(config, model, sizes, device.table, progress))
    info = engine.info()
    log.info(
        "loaded",
        kernels=info.kernels,
        device=info.device,
        executor=config.executor,
        kv_pages=info.num_pages,
        kv_bytes=info.kv_bytes,
        scratch_bytes=info.scratch_bytes,
    )
    return Loaded(model, replace(sizes, num_pages=info.num_pages), engine, info)


def engine_options(
    config: WorkerConfig, model: Model, sizes: Sizes, table: str = "cpu", progress: Progress | None = None
) -> EngineOptions:
    """Raises UnsupportedError if the executor cannot be had."""
    return EngineOptions(
        kernels_path=kernel_table_path(table),
        ranks=with_executor(rank_options(model, config.gpu if on_gpu(table) else None), config.executor),
        tensors=model.tensors,
        max_rows=config.step_tokens,
        max_samples=config.max_running,
        max_slots=config.max_running,
        max_context=sizes.max_context,
        num_pages=sizes.num_pages,
        fit_pages=sizes.fit_pages,
        num_threads=config.threads,
        progress=progress,
    )


def shared_kv(model: Model, table: str) -> KvCache:
    """The KV cache of all ranks whose pages share a memory: a GPU has one rank, the host has all."""
    kv = model.mixed.kv
    return kv if on_gpu(table) else replace(kv, kv_heads=sum(rank.mixed.kv.kv_heads for rank in model.ranks))


def _log_memory(config: WorkerConfig, rank: RankPlans, sizes: Sizes) -> None:
    """What the rank is going to take; with `fit_pages` the KV pages are the most that it may take."""
    memory = rank_memory(
        rank.mixed,
        rank.decode,
        tokens=config.step_tokens,
        samples=config.max_running,
        pages=sizes.num_pages,
        page_size=PAGE_SIZE,
    )
    log.info(
        "rank_memory",
        **rank.layout.meta,
        weight_bytes=memory.weights,
        kv_bytes=memory.kv_pages,
        buffer_bytes=memory.buffers,
        total_bytes=memory.total,
    )


class LoadingGate(engine_pb2_grpc.EngineServiceServicer):
    """Stands for the service on its port. Until `open` each RPC is UNAVAILABLE, with how far loading is."""

    def __init__(self) -> None:
        self._service: EngineService | None = None
        self._state = "reads the checkpoint"
        self._began: float | None = None

    def tell(self, done: int, total: int) -> None:
        """Bytes of weights that are loaded. From any thread."""
        log.info("loading_weights", done_bytes=done, total_bytes=total, gb_per_s=self._rate(done))
        # In tens: each change is a line in the log of every router that waits.
        self._state = f"loads the weights, {10 * (10 * done // max(total, 1))} % done"

    def _rate(self, done: int) -> float:
        """GB/s since the first report, which counts 0 bytes."""
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        return round(done / max(now - self._began, 1e-9) / 1e9, 2)

    def open(self, service: EngineService) -> None:
        """Pass everything on to `service` from now on."""
        self._service = service

    def finish_streams(self) -> None:
        """See EngineService; before `open` there are none."""
        if self._service is not None:
            self._service.finish_streams()

    def Serve(
        self, request_iterator: AsyncIterator[engine_pb2.ServeRequest], context: ServeContext
    ) -> AsyncIterator[engine_pb2.ServeResponse]:
        return self._opened().Serve(request_iterator, context)

    async def GetInfo(self, request: engine_pb2.GetInfoRequest, context: Context) -> engine_pb2.GetInfoResponse:
        return await self._opened().GetInfo(request, context)

    async def GetLoad(self, request: engine_pb2.GetLoadRequest, context: Context) -> engine_pb2.GetLoadResponse:
        return await self._opened().GetLoad(request, context)

    def _opened(self) -> EngineService:
        if self._service is None:
            raise UnavailableError(f"it {self._state}")
        return self._service
