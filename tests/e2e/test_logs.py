"""What people ask and what they are told stays out of the logs of both services, at every level and on every path."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from glmserve.inference.v1 import inference_pb2 as pb
from glmserve.inference.v1 import inference_pb2_grpc as rpc
from tests.e2e.client import generate, request
from tests.unit.router_harness import wait_health

MARKER = "xyzzy-plugh"


@asynccontextmanager
async def logged(directory: Path, name: str, module: str, *args: str) -> AsyncIterator[str]:
    """Address of a service whose stderr goes to NAME.log in `directory`."""
    ready, log = directory / f"{name}.json", directory / f"{name}.log"
    command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, "--log-level", "debug", *args, stderr=stderr)
        try:
            while not ready.exists():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.02)
            yield json.loads(ready.read_text())["address"]
        finally:
            process.terminate()
            await process.wait()


async def ask_every_way(channel: grpc.aio.Channel) -> str:
    """Good, bad, cancelled and broken requests with the marker in them. Returns a text that the model said."""
    client: Any = rpc.InferenceServiceStub(channel)
    answer = await generate(client, f"Say {MARKER}", max_tokens=24, ignore_eos=True)
    turn = pb.ChatMessage(role=pb.ROLE_USER, content=MARKER)
    async for _ in client.Chat(pb.ChatRequest(messages=[turn], sampling=pb.SamplingOptions(max_tokens=4))):
        pass
    await client.Tokenize(pb.TokenizeRequest(text=MARKER))
    cancelled = client.Generate(request(MARKER, max_tokens=3000, ignore_eos=True))
    await cancelled.read()
    cancelled.cancel()
    raw: Any = channel.unary_stream("/glmserve.inference.v1.InferenceService/Generate")
    for bad in (
        client.Generate(request(MARKER, stop=[MARKER * 100])),
        client.Generate(request(MARKER, temperature=9.0)),
        client.Generate(pb.GenerateRequest(model=MARKER, prompt=MARKER)),
        client.Chat(pb.ChatRequest(messages=[pb.ChatMessage(role=99, content=MARKER)])),  # type: ignore[arg-type]
        client.Generate(request(MARKER * 10_000)),
        raw(b"\x12\x0e" + MARKER.encode() + b"\xc3\x28\xff"),
    ):
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in bad:
                pass
        assert await bad.code() is not grpc.StatusCode.OK
    return answer.text


async def test_neither_prompts_nor_answers_are_logged(model_dir: Path, tmp_path: Path) -> None:
    model = ("--model", str(model_dir))
    async with (
        logged(tmp_path, "worker", "engine_worker", *model) as worker,
        logged(tmp_path, "router", "router", *model, "--worker", worker) as router,
        grpc.aio.insecure_channel(router) as channel,
    ):
        await wait_health(channel, True)
        said = await ask_every_way(channel)
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("worker", "router")}
    assert '"request_finished"' in logs["worker"]
    assert '"INVALID_ARGUMENT"' in logs["router"]
    for log in logs.values():
        assert MARKER not in log
        assert "plugh" not in log
        assert said.strip() not in log
