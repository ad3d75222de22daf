"""The worker process: listen, load, warm up, serve, drain.

Exit codes: 0 after a stop was asked for, 1 if the engine failed or is stuck, 2 if the worker cannot be set up as
configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version

import grpc
import structlog
import uvloop

from engine_worker.config import WorkerConfig, scheduler_limits
from engine_worker.constraints.compiler import ConstraintCompiler
from engine_worker.constraints.masks import MaskFiller
from engine_worker.errors import EngineFailedError, EngineStuckError, WorkerError
from engine_worker.expert_loads import ExpertLoadReader, watch_expert_loads
from engine_worker.loading import Loaded, LoadingGate, load
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.c_types import MAX_IN_FLIGHT, PAGE_SIZE
from engine_worker.runtime.loop import EngineLoop
from engine_worker.runtime.step import StepPacker
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.service import SERVICE_NAME, Admission, EngineService
from engine_worker.telemetry import WorkerTelemetry
from engine_worker.validation import Validator
from engine_worker.watchdog import wait_until_stalled, wait_until_stuck
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service import logs
from glmserve.service.grpc_server import (
    GrpcServer,
    ServerSecurity,
    start_server,
    stop_with_stdin,
    wait_for_stop,
    write_ready_file,
)
from glmserve.service.settings import SettingsError
from glmserve.service.telemetry import Telemetry, running_telemetry

log = structlog.get_logger()

# A message of submits holds prompts of up to the longest contexts, at up to 5 bytes a token.
_MAX_MESSAGE_BYTES = 64 * 2**20
# For the last responses of a stream to reach its router.
_FLUSH_SECONDS = 2.0
# For those who watch our health to hear that the engine is stuck.
_STUCK_FLUSH_SECONDS = 0.5
# How long the interpreter lets one thread run while another waits. At the default, 5 ms, the engine's thread could lose
# several steps' time to a busy server thread.
_SWITCH_INTERVAL_S = 0.0005


def main(argv: Sequence[str]) -> int:
    """Run a worker with settings from `argv`, the environment and a file. Returns the exit code."""
    try:
        config = WorkerConfig.load(argv, prog="glm worker")
        logs.configure("engine_worker", config.log_level)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(config))
    except EngineFailedError as error:
        return _report(error, 1)
    except (WorkerError, SettingsError, OSError) as error:
        return _report(error, 2)
    return 0


def _report(error: Exception, code: int) -> int:
    print(f"glm worker: error: {error}", file=sys.stderr)
    return code


async def _run(config: WorkerConfig) -> None:
    security = ServerSecurity(config.credentials(), reflection=config.reflects)
    _stop_at_once_on_signals()
    if config.stop_with_stdin:
        stop_with_stdin()
    gate = LoadingGate()
    with running_telemetry("worker", config) as telemetry:
        async with _grpc_server(config, gate, security) as server:
            if config.ready_file:
                write_ready_file(config.ready_file, server.address, tls=config.tls)
            log.info("listening", address=server.address, metrics=telemetry.metrics_address)
            loaded = await asyncio.to_thread(load, config, gate.tell)
            with loaded.engine:
                await _serve(config, loaded, server, gate, telemetry)


def _stop_at_once_on_signals() -> None:
    """Until we serve: loading cannot be interrupted, and there is nothing to hand over or give back."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, os._exit, 0)


async def _serve(
    config: WorkerConfig, loaded: Loaded, server: GrpcServer, gate: LoadingGate, telemetry: Telemetry
) -> None:
    """From the warm-up to the end of the drain."""
    service = _make_service(config, loaded, telemetry)
    loop = _make_loop(config, loaded, service)
    gate.open(service)
    async with _watched(config, loaded, server, loop), _running(loop), _expert_loads_read(config, loaded, service):
        await _warm_up(service)
        await server.set_serving(True)
        log.info("serving", address=server.address)
        await wait_for_stop(service.wait_for_failure())
        log.info("draining", limit_s=config.drain_seconds)
        await server.set_serving(False)
        await service.drain(config.drain_seconds)


@contextlib.asynccontextmanager
async def _grpc_server(config: WorkerConfig, gate: LoadingGate, security: ServerSecurity) -> AsyncIterator[GrpcServer]:
    """The gRPC server, NOT_SERVING at first; at the end streams get their last responses."""

    def register(server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(gate, server)

    server = await start_server(register, [SERVICE_NAME], config.listen, _MAX_MESSAGE_BYTES, security)
    try:
        yield server
    finally:
        await server.set_serving(False)
        gate.finish_streams()
        await server.server.stop(_FLUSH_SECONDS)


@contextlib.asynccontextmanager
async def _watched(config: WorkerConfig, loaded: Loaded, server: GrpcServer, loop: EngineLoop) -> AsyncIterator[None]:
    """End the process if the engine gets stuck during the block, the loop's stop included."""
    stuck = asyncio.create_task(_wait_until_stuck(config, loaded, loop))
    end = asyncio.create_task(_exit_when_stuck(stuck, loaded.engine, server))
    try:
        yield
    finally:
        # Once it is stuck, closing the engine could wait for ever: the other task ends the process first.
        if stuck.done():
            await end
        stuck.cancel()
        end.cancel()


async def _wait_until_stuck(config: WorkerConfig, loaded: Loaded, loop: EngineLoop) -> EngineStuckError:
    """By its steps and, where ranks wait for each other, by their operations."""
    waits = [asyncio.ensure_future(wait_until_stuck(lambda: loop.step_age_s, config.step_timeout_seconds))]
    if len(loaded.model.ranks) > 1:
        waits.append(asyncio.ensure_future(wait_until_stalled(loaded.engine.progress, config.stall_seconds)))
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for wait in waits:
            wait.cancel()


async def _exit_when_stuck(stuck: asyncio.Task[EngineStuckError], engine: Engine, server: GrpcServer) -> None:
    error = await stuck
    log.error("engine_stuck", error=str(error))
    engine.abort(str(error))  # whoever waits for a rank is woken, and open requests end with what they have
    await server.set_alive(False)
    await server.set_serving(False)
    await server.server.stop(_STUCK_FLUSH_SECONDS)
    # An engine thread that hangs does not come back, so that nothing can be closed: not in order, only at once.
    os._exit(_report(error, 1))


@contextlib.asynccontextmanager
async def _expert_loads_read(config: WorkerConfig, loaded: Loaded, service: EngineService) -> AsyncIterator[None]:
    """Now and then, and at the end of the block, unless the engine has failed."""
    reader = ExpertLoadReader(loaded.engine, loaded.model)
    task = asyncio.create_task(watch_expert_loads(reader, service.take_expert_loads, config.expert_loads))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, WorkerError):
            await task


@contextlib.asynccontextmanager
async def _running(loop: EngineLoop) -> AsyncIterator[None]:
    """The engine's thread, to the end of the block; then what is open is ended UNAVAILABLE."""
    loop.start()
    try:
        yield
    finally:
        await asyncio.to_thread(loop.stop)


async def _warm_up(service: EngineService) -> None:
    """Prefill and decode for real, before anybody is told that we serve."""
    sampling = engine_pb2.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    submit = engine_pb2.Submit(request_id=1, prompt_token_ids=[0] * 8, sampling=sampling, trace_id="warm-up")
    finish = await service.generate(submit)
    if finish.reason != engine_pb2.FINISH_REASON_LENGTH:
        raise EngineFailedError(f"warm-up generation ended with {engine_pb2.FinishReason.Name(finish.reason)}")


def _make_loop(config: WorkerConfig, loaded: Loaded, service: EngineService) -> EngineLoop:
    scheduler = Scheduler(scheduler_limits(config, loaded.sizes))
    packer = StepPacker(config.step_tokens, config.max_running, loaded.sizes.max_context // PAGE_SIZE)
    masks = MaskFiller(config.max_running, loaded.info.vocab)
    loop = EngineLoop(loaded.engine, scheduler, packer, masks, service.deliver, max_in_flight=MAX_IN_FLIGHT)
    service.attach(loop)
    return loop


def _make_service(config: WorkerConfig, loaded: Loaded, telemetry: Telemetry) -> EngineService:
    model, sizes, info = loaded.model, loaded.sizes, loaded.info
    message = engine_pb2.GetInfoResponse(
        model_name=config.model.name,
        model_revision=model.revision,
        vocab_size=info.vocab,
        max_context=sizes.max_context,
        max_running_requests=config.max_running,
        eos_token_ids=model.config.eos_token_ids,
        kernels=info.kernels,
        device=info.device,
        weight_bytes=info.weight_bytes_mapped + info.weight_bytes_copied,
        kv_bytes=info.kv_bytes,
        page_size=PAGE_SIZE,
        total_pages=info.num_pages,
        version=version("glmserve"),
        step_timeout_ms=int(config.step_timeout_seconds * 1000),
        prompt_logprobs=True,
    )
    validator = Validator(info.vocab, model.config.eos_token_ids, scheduler_limits(config, sizes))
    admission = Admission(
        max_waiting_requests=config.max_waiting_requests,
        max_waiting_prompt_tokens=config.max_waiting_prompt_tokens,
        max_requests_per_stream=config.max_waiting_requests + config.max_running,
    )
    compiler = ConstraintCompiler(config.model, info.vocab, model.config.eos_token_ids)
    told = WorkerTelemetry(telemetry, each_expert=config.expert_metrics)
    return EngineService(message, validator, admission, compiler=compiler, telemetry=told)
