"""`make bench`: the embedded model on the CPU table, each figure beside its floor.

The floor of a step is what its plan must read and compute at the speed that this machine reaches at best, op by op;
floor_ratio = floor / measured, 1 being perfect. Figures are the best of REPEATS runs: other work on the machine can
only slow one down.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from engine_worker.plan.cost import floor_seconds, step_cost
from engine_worker.plan.record import Plan
from tests.bench.engine import Arrival, Bench, loaded
from tests.bench.machine import BUILD, Machine, measure_machine, memory_mb
from tests.bench.router import router_cpu_us_per_token

REPEATS = 3
BATCHES = (1, 4, 8, 16)
PROMPT = 64
DECODE = 96
PREFILL = 512


@dataclass(frozen=True)
class Case:
    """One figure. Seconds are of one step; outside_kernels is the share of the wall time in which no kernel ran."""

    name: str
    tokens_per_s: float
    floor_tokens_per_s: float
    floor_ratio: float
    outside_kernels: float


def decode_case(bench: Bench, machine: Machine, batch: int) -> Case:
    """Steps in which all requests decode, from the last first token to the first end."""
    runs = [_steady_decode(*bench.run(_prompts(bench, batch, PROMPT), DECODE)[1:], batch) for _ in range(REPEATS)]
    seconds, device = min(runs)
    contexts = [PROMPT + DECODE // 2] * batch
    return _case(f"decode batch {batch}", batch, seconds, device, _floor(bench.model.decode, batch, contexts, machine))


def _steady_decode(arrivals: Sequence[Arrival], device_ns: Sequence[int], batch: int) -> tuple[float, float]:
    """Seconds and device seconds of a step, over the steps that brought a token to every request."""
    full = [arrival for arrival in arrivals if arrival.tokens == batch]
    first, last = full[0], full[-1]
    steps = len(full) - 1
    device = statistics.fmean(device_ns[first.steps : last.steps]) / 1e9
    return (last.at - first.at) / steps, device


def prefill_case(bench: Bench, machine: Machine) -> Case:
    """From submit to the first token of one prompt."""
    runs = []
    for _ in range(REPEATS):
        start, arrivals, device_ns = bench.run(_prompts(bench, 1, PREFILL), 1)
        runs.append((next(a.at for a in arrivals if a.tokens) - start, sum(device_ns) / 1e9))
    seconds, device = min(runs)
    floor = _floor(bench.model.mixed, PREFILL, [PREFILL], machine, samples=1)
    return _case(f"prefill {PREFILL}", PREFILL, seconds, device, floor)


def _case(name: str, tokens: int, seconds: float, device_seconds: float, floor: float) -> Case:
    outside = max(0.0, 1 - device_seconds / seconds)
    return Case(name, tokens / seconds, tokens / floor, floor / seconds, outside)


def _floor(plan: Plan, tokens: int, contexts: Sequence[int], machine: Machine, samples: int | None = None) -> float:
    costs = step_cost(plan, tokens, tokens if samples is None else samples, contexts)
    return floor_seconds(costs, machine.read_bandwidth_gb_s * 1e9, machine.fma_gflops * 1e9)


def _prompts(bench: Bench, count: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(bench.info.vocab) for _ in range(length)] for _ in range(count)]


def main() -> None:
    """Measure, print a table, write build/bench/cpu.json."""
    machine = measure_machine()
    model_dir = resolve_model(DEFAULT_MODEL)
    with loaded(model_dir) as (bench, load_seconds):
        memory = {key: memory_mb(os.getpid(), key) for key in ("VmHWM", "RssAnon", "RssFile")}
        cases = [*(decode_case(bench, machine, batch) for batch in BATCHES), prefill_case(bench, machine)]
        memory["VmHWM"] = memory_mb(os.getpid(), "VmHWM")
        info = bench.info
    result = {
        **asdict(machine),
        "device": info.device,
        "cases": {case.name: asdict(case) for case in cases},
        "batch_16_over_batch_1": cases[3].tokens_per_s / cases[0].tokens_per_s,
        "load_s": load_seconds,
        "weight_mb_mapped": info.weight_bytes_mapped / 1e6,
        "weight_mb_copied": info.weight_bytes_copied / 1e6,
        "memory_mb": memory,
        "router_cpu_us_per_token": router_cpu_us_per_token(model_dir),
    }
    _print(result, cases)
    path = BUILD / "cpu.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path.relative_to(Path.cwd())}")


def _print(result: dict[str, object], cases: Sequence[Case]) -> None:
    table = Table(
        title=f"{result['device']}, reads {result['read_bandwidth_gb_s']} GB/s, {result['fma_gflops']} GFLOP/s"
    )
    for column in ("case", "tokens/s", "floor", "ratio", "outside kernels"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in cases:
        table.add_row(
            case.name,
            f"{case.tokens_per_s:.1f}",
            f"{case.floor_tokens_per_s:.1f}",
            f"{case.floor_ratio:.2f}",
            f"{case.outside_kernels:.1%}",
        )
    console = Console()
    console.print(table)
    for key, value in result.items():
        if key not in ("cases", "device"):
            console.print(f"{key}: {value}", highlight=False)


if __name__ == "__main__":
    main()
