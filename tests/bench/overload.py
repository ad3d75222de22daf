"""Load beyond capacity: what is accepted keeps its latency, what is not is refused at once.

`python -m tests.bench.overload` measures capacity with a closed loop, then sends 0.5, 1, 2 and 5 times as much in an
open loop, on the embedded model. It writes build/bench/overload.json.
"""

from __future__ import annotations

import json
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from deploy.load.arrivals import Arrival, poisson
from deploy.load.client import Sample, connected
from deploy.load.report import Slo, summarise
from deploy.local import LocalCluster, LocalOptions, local_cluster
from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from tests.bench.machine import BUILD, memory_mb

SECONDS = 20.0
FACTORS = (0.5, 1.0, 2.0, 5.0)
SHAPE = Arrival(0.0, prompt_tokens=32, output_tokens=16)
RUNNING = 16
QUEUE_S = 2.0


async def capacity(address: str) -> tuple[float, Slo]:
    """Requests a second with RUNNING in flight, after a warm-up that lets the worker measure its pace; and an SLO.

    The SLO is in the machine's own terms: the queue that the router allows, and twice what full load takes.
    """
    async with connected(address, 1, 0, 0) as client:
        await client.run_closed(SHAPE, RUNNING, SECONDS / 2)
        report = summarise(await client.run_closed(SHAPE, RUNNING, SECONDS), Slo(0, 0))
    ttft_ms = QUEUE_S * 1000 + 2 * report["ttft_ms"]["p95"]
    return float(report["requests_per_s"]), Slo(round(ttft_ms), round(2 * report["time_per_output_token_ms"]["p95"]))


async def open_loop(address: str, rate: float) -> list[Sample]:
    async with connected(address, 4, 1, 0) as client:
        return await client.run_open(poisson(rate, SECONDS, SHAPE.prompt_tokens, SHAPE.output_tokens, seed=1))


def measure(cluster: LocalCluster) -> dict[str, Any]:
    most, slo = uvloop.run(capacity(cluster.router))
    runs = {}
    for factor in FACTORS:
        report = summarise(uvloop.run(open_loop(cluster.router, factor * most)), slo)
        report["router_anon_mb"] = memory_mb(cluster.router_pid, "RssAnon")
        runs[f"{factor:g}x"] = report
    best = max(run["goodput"]["requests_per_s"] for run in runs.values())
    last = runs[f"{FACTORS[-1]:g}x"]["goodput"]["requests_per_s"]
    return {"capacity_requests_per_s": most, "goodput_at_5x_over_best": round(last / best, 3), "runs": runs}


def main() -> None:
    """Measure, print, write."""
    options = LocalOptions(
        resolve_model(DEFAULT_MODEL),
        worker_args=["--max-running", str(RUNNING)],
        router_args=["--max-queue-s", str(QUEUE_S), "--log-level", "warning"],
    )
    with local_cluster(options, report=lambda _: None) as cluster:
        result = measure(cluster)
    table = Table(title=f"capacity {result['capacity_requests_per_s']:.2f} requests/s")
    columns = (
        "load",
        "sent",
        "answered",
        "refused",
        "goodput/s",
        "TTFT p50",
        "p95",
        "per token p50",
        "refusal p99",
        "MB",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for name, run in result["runs"].items():
        table.add_row(
            name,
            str(run["requests"]),
            str(run["by_status"].get("OK", 0)),
            str(run["by_status"].get("RESOURCE_EXHAUSTED", 0)),
            f"{run['goodput']['requests_per_s']:.2f}",
            *(_ms(run, "ttft_ms", key) for key in ("p50", "p95")),
            _ms(run, "time_per_output_token_ms", "p50"),
            _ms(run, "refusal_ms", "p99"),
            f"{run['router_anon_mb']:.0f}",
        )
    Console(width=140).print(table)
    print(f"goodput at 5x over the best: {result['goodput_at_5x_over_best']}")
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "overload.json").write_text(json.dumps(result, indent=2) + "\n")


def _ms(run: dict[str, Any], name: str, key: str) -> str:
    return "-" if run[name] is None else f"{run[name][key]:.1f}"


if __name__ == "__main__":
    main()
