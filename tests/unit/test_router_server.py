"""The router as a process: start-up errors, readiness, health, reflection, logs, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.unit.router_harness import ScriptedWorker, bench, encode, running_worker, step, wait_health, write_model

SERVICE = "glmserve.inference.v1.InferenceService"


async def launch(*args: object, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router",
        *map(str, args),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )


@contextlib.asynccontextmanager
async def router_process(
    directory: Path, worker: str, *args: object
) -> AsyncIterator[tuple[asyncio.subprocess.Process, grpc.aio.Channel]]:
    """A router process that serves. It is killed at the end if it still runs."""
    ready = directory / "ready.json"
    process = await launch(
        "--model", write_model(directory), "--worker", worker, "--listen", "127.0.0.1:0", "--ready-file", ready, *args
    )
    try:
        assert process.stderr is not None
        while b'"listening"' not in (line := await process.stderr.readline()):
            assert line, "the router ended"
        async with grpc.aio.insecure_channel(json.loads(line)["address"]) as channel:
            await wait_health(channel, True, SERVICE)
            yield process, channel
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def failed_start(*args: object, **environment: str) -> str:
    """Our one line of a start that ends."""
    process = await launch(*args, **environment)
    _, stderr = await process.communicate()
    assert process.returncode == 2, stderr
    # gRPC's core has its own say on a port that is taken.
    lines = [line for line in stderr.decode().splitlines() if line.startswith("glm router: ")]
    assert len(lines) == 1, stderr
    return lines[0]


async def test_a_bad_setting_ends_the_start_with_one_line_and_code_2(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert "worker: Field required" in await failed_start("--model", model)
    assert "GLM_ROUTER_BOGUS" in await failed_start("--model", model, "--worker", "127.0.0.1:1", GLM_ROUTER_BOGUS="1")


async def test_a_bad_model_or_a_taken_port_ends_the_start_with_one_line_and_code_2(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert str(nowhere / "config.json") in await failed_start("--model", nowhere, "--worker", "127.0.0.1:1")
    async with running_worker(ScriptedWorker()) as taken:
        line = await failed_start("--model", write_model(tmp_path), "--worker", "127.0.0.1:1", "--listen", taken)
        assert taken in line


async def test_serves_logs_each_request_without_its_text_and_stops_cleanly(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    worker.answer = lambda submit: [step(submit.request_id, encode("a secret answer"), "LENGTH")]
    async with running_worker(worker) as address, router_process(tmp_path, address) as (process, channel):
        ready = json.loads((tmp_path / "ready.json").read_text())
        assert ready["pid"] == process.pid
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(prompt="a secret prompt")
        call = client.Generate(request, metadata=(("x-request-id", "r-1"),))
        assert [response.text async for response in call] == ["a secret answer"]
        refused = client.Generate(inference_pb2.GenerateRequest(prompt=""), metadata=(("x-request-id", "r-2"),))
        assert await refused.code() == grpc.StatusCode.INVALID_ARGUMENT
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = (await process.stderr.read()).decode()
        assert await process.wait() == 0
    assert "secret" not in log
    lines = {line["request_id"]: line for line in map(json.loads, log.splitlines()) if line["event"] == "request"}
    done = lines["r-1"]
    assert (done["status"], done["finish"], done["method"]) == ("OK", "length", "Generate")
    assert done["caller"] == "anonymous"
    assert done["prompt_tokens"] == len(encode("a secret prompt"))
    assert done["completion_tokens"] == len(encode("a secret answer"))
    assert {"ttft_ms", "tps", "total_ms"} <= set(done)
    assert lines["r-2"]["status"] == "INVALID_ARGUMENT"


async def test_sigterm_lets_running_requests_finish(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    async with running_worker(worker) as address, router_process(tmp_path, address) as (process, channel):
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = client.Generate(inference_pb2.GenerateRequest(prompt="x"))
        submit = await worker.submits.get()
        process.send_signal(signal.SIGTERM)
        await wait_health(channel, False)
        refused = client.Generate(inference_pb2.GenerateRequest(prompt="x"))
        assert await refused.code() == grpc.StatusCode.UNAVAILABLE
        worker.finish(submit.request_id, encode("done"))
        assert [response.text async for response in call] == ["done"]
        assert await process.wait() == 0


async def test_sigterm_gives_up_on_what_does_not_finish_in_the_limit(tmp_path: Path) -> None:
    worker = ScriptedWorker()
    async with (
        running_worker(worker) as address,
        router_process(tmp_path, address, "--drain-s", "0") as (process, channel),
    ):
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = client.Generate(inference_pb2.GenerateRequest(prompt="x"))
        await worker.submits.get()
        process.send_signal(signal.SIGTERM)
        assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        assert await process.wait() == 0


async def test_health_names_every_service_and_reflection_lists_them() -> None:
    async with bench() as b:
        health: Any = health_pb2_grpc.HealthStub(b.channel)
        for name in ("", SERVICE, "liveness"):
            response = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        reflection: Any = reflection_pb2_grpc
        call = reflection.ServerReflectionStub(b.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = await call.read()
        assert SERVICE in {service.name for service in listed.list_services_response.service}
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()
