"""`glm bench serve` and `glm top`: their arguments, and what they print of a scripted pair."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from deploy.cli.main import app
from glmserve.engine.v1 import engine_pb2
from glmserve.service.telemetry import TelemetrySettings, running_telemetry
from tests.unit.router_harness import bench, step


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["bench", "serve"], "--rate / --concurrency / --trace"),
        (["bench", "serve", "--rate", "1", "--concurrency", "1"], "--rate / --concurrency / --trace"),
        (["bench", "serve", "--rate", "0"], "--rate"),
        (["bench", "serve", "--concurrency", "0"], "--concurrency"),
        (["bench", "serve", "--trace", "/nothing/like/it"], "/nothing/like/it"),
        (["bench", "serve", "--target", "127.0.0.1:1", "--rate", "1"], "127.0.0.1:1"),
        (["top"], "--worker / --router"),
        (["top", "--worker", "a:1", "--json"], "--json"),
        (["top", "--worker", "a:1", "--interval", "0"], "--interval"),
    ],
)
def test_a_wrong_argument_is_named(args: list[str], named: str) -> None:
    code, out, err = run(*args)
    assert code in (1, 2)
    assert out == ""
    assert named in err


async def test_bench_prints_one_object(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 2}\n' * 3)
    # The router logs in this process, which would be in what the command prints.
    with capture_logs():
        async with bench() as b:
            b.worker.answer = lambda submit: [
                step(submit.request_id, [300]),
                step(submit.request_id, [301], "LENGTH", usage={"prompt_tokens": 4}),
            ]
            args = ("bench", "serve", "--target", b.router.address, "--trace", str(trace))
            code, out, err = await asyncio.to_thread(run, *args, "--json")
            assert (code, err) == (0, "")
            report = json.loads(out)
            assert report["by_status"] == {"OK": 3}
            assert report["ttft_ms"]["p50"] > 0
            code, out, _ = await asyncio.to_thread(run, *args)
            assert code == 0
            assert "3 OK" in out


async def test_top_shows_worker_and_router_and_what_is_down() -> None:
    settings = TelemetrySettings(metrics_listen="127.0.0.1:0")
    with capture_logs(), running_telemetry("router", settings) as telemetry:
        async with bench(telemetry=telemetry) as b:
            b.worker.answer = lambda submit: [step(submit.request_id, [300], "LENGTH")]
            await asyncio.to_thread(_generate, b.router.address)
            assert telemetry.metrics_address is not None
            subjects = ("--worker", b.worker_server.address, "--router", telemetry.metrics_address)
            args = ("top", "--once", "--interval", "0.05", *subjects, "--worker", "127.0.0.1:1")
            code, out, _ = await asyncio.to_thread(run, *args, "--json")
            assert code == 0
            seen = json.loads(out)
            [router] = seen["routers"]
            assert (router["error"], router["workers_serving"], router["requests_in_flight"]) == (None, 1, 0)
            assert router["output_tokens_per_s"] == 0
            up, down = seen["workers"]
            assert (up["error"], up["running_requests"], up["generated_tokens_per_s"], up["draining"]) == (
                None,
                engine_pb2.Load().running_requests,
                0,
                False,
            )
            assert down["error"].startswith("UNAVAILABLE")
            assert down["running_requests"] is None
            code, out, _ = await asyncio.to_thread(run, *args)
            assert code == 0
            assert "down" in out
            assert "prefix hit share" in out


def _generate(address: str) -> None:
    code, _, err = run("generate", "--target", address, "--prompt", "The capital", "--max-tokens", "4")
    assert code == 0, err
