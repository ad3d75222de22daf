"""What the router itself costs: against a worker that computes nothing, in processes of their own.

`python -m tests.bench.router_throughput` measures, at 64 streams, CPU time a streamed token at a real pace, at one that
is beyond the router's capacity, and at full speed (a step whenever there is credit, so that nothing is merged); tokens
a second; and the time to first token that the two hops add. It writes build/bench/router.json.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.child import Child
from deploy.load.arrivals import Arrival
from deploy.load.client import LoadClient, Sample, connected
from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from tests.bench.machine import BUILD, cpu_seconds

STREAMS = 64
TOKENS = 512
PACE_MS = 25.0
FAST_MS = 3.0
PROBES = 300
REPEATS = 3


@dataclass(frozen=True)
class Cost:
    """`tokens_per_router_core`: tokens for each second of the router's CPU time, its own and gRPC's threads'."""

    pace_ms: float
    cpu_us_per_token: float
    tokens_per_router_core: float
    tokens_per_s: float
    tokens_per_message: float


@dataclass(frozen=True)
class _Pair:
    router: str
    pid: int


@contextlib.contextmanager
def pair(model: Path, pace_ms: float, *router_args: str) -> Iterator[_Pair]:
    """A fast worker and a router in front of it."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        worker_file, router_file = Path(directory) / "worker.json", Path(directory) / "router.json"
        worker = Child("worker", "tests.bench.fast_worker", [str(pace_ms), str(vocab_size), str(worker_file)])
        stack.callback(worker.stop)
        address = _address(worker, worker_file)
        flags = ["--model", str(model), "--worker", address, "--listen", "127.0.0.1:0", "--ready-file"]
        router = Child("router", "router", [*flags, str(router_file), "--log-level", "warning", *router_args])
        stack.callback(router.stop)
        running = _Pair(_address(router, router_file), router.pid)
        _wait_serving(running.router)
        yield running


def _address(child: Child, ready_file: Path) -> str:
    while not ready_file.exists():
        child.check()
        time.sleep(0.02)
    return str(json.loads(ready_file.read_text())["address"])


def _wait_serving(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for response in health.Watch(health_pb2.HealthCheckRequest()):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def _streams(client: LoadClient) -> list[Sample]:
    return await client.run_open([Arrival(0.0, 32, TOKENS)] * STREAMS)


def cost(model: Path, pace_ms: float, *router_args: str) -> Cost:
    """The best of REPEATS runs, after one to warm up: other work on the machine can only make it dearer."""
    with pair(model, pace_ms, *router_args) as running:
        return min(uvloop.run(_costs(running, pace_ms)), key=lambda found: found.cpu_us_per_token)


async def _costs(running: _Pair, pace_ms: float) -> list[Cost]:
    costs = []
    async with connected(running.router, 4, 0, 0) as client:
        await _streams(client)
        for _ in range(REPEATS):
            cpu, start = cpu_seconds(running.pid), time.perf_counter()
            samples = await _streams(client)
            cpu, seconds = cpu_seconds(running.pid) - cpu, time.perf_counter() - start
            tokens = sum(sample.output_tokens for sample in samples)
            assert tokens == STREAMS * TOKENS, f"{tokens} tokens of {STREAMS * TOKENS}"
            messages = sum(len(sample.gaps_s) + 1 for sample in samples)
            costs.append(Cost(pace_ms, cpu / tokens * 1e6, tokens / cpu, tokens / seconds, tokens / messages))
    return costs


def added_ttft_ms(model: Path) -> dict[str, float]:
    """From a client's send to the first token, one request at a time, with a worker that answers at once."""

    async def probe(address: str) -> list[Sample]:
        async with connected(address, 1, 0, 0) as client:
            await client.run_closed(Arrival(0.0, 64, 1), 1, 0.5)
            samples: list[Sample] = []
            while len(samples) < PROBES:
                samples += await client.run_closed(Arrival(0.0, 64, 1), 1, 0.5)
            return samples

    with pair(model, 0.0) as running:
        found = sorted((sample.ttft_s or 0.0) * 1e3 for sample in uvloop.run(probe(running.router)))
    return {"p50": statistics.median(found), "p99": found[int(len(found) * 0.99)]}


def main() -> None:
    """Measure, print, write."""
    model = resolve_model(DEFAULT_MODEL)
    result = {
        "streams": STREAMS,
        "paced": asdict(cost(model, PACE_MS)),
        "paced_merged": asdict(cost(model, PACE_MS, "--stream-interval-ms", "70")),
        "beyond_capacity": asdict(cost(model, FAST_MS)),
        "full_speed": asdict(cost(model, 0.0)),
        "full_speed_with_metrics": asdict(cost(model, 0.0, "--metrics-listen", "127.0.0.1:0")),
        "added_ttft_ms": added_ttft_ms(model),
    }
    print(json.dumps(result, indent=2))
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "router.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
