"""How the cost of a token grows on the CPU: with the batch, the context, the number of experts, the threads.

Decode steps of the embedded model's shape on made-up weights and keys, greedy; each point is the fastest of some steps,
beside the floor of its plan as `make bench` has it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deploy.load.plots import require_matplotlib
from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from engine_worker.models import Model, build_model
from engine_worker.plan.cost import floor_seconds, step_cost
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import Sampling
from tests.bench.machine import BUILD, Machine, measure_machine

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)
EXPERTS = (8, 16, 32, 64, 96, 160)
THREADS = (1, 2)
CONTEXT = 128
SECONDS = 0.4  # of steps at a point, about
MOST_STEPS = 40


@dataclass(frozen=True)
class Point:
    """Seconds of one token: of a step, divided by its tokens."""

    curve: str
    x: int
    token_s: float
    floor_s: float


class Bench:
    def __init__(self, checkpoint: Path, machine: Machine, scratch: Path) -> None:
        self._checkpoint = checkpoint
        self._machine = machine
        self._scratch = scratch

    def model(self, experts: int | None = None) -> Model:
        """The embedded model's shape, with another number of experts if one is given."""
        config = json.loads((self._checkpoint / "config.json").read_text())
        config["n_routed_experts"] = experts or config["n_routed_experts"]
        directory = self._scratch / str(experts)
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        shutil.copyfile(self._checkpoint / "generation_config.json", directory / "generation_config.json")
        return build_model(directory, "auto", synthetic_seed=1)

    def points(
        self, curve: str, model: Model, shapes: Sequence[tuple[int, StepShape]], threads: int
    ) -> Iterator[Point]:
        """One engine for all shapes."""
        options = options_for(model, "cpu", [shape for _, shape in shapes], num_threads=threads)
        with Engine.create(options) as engine:
            for x, shape in shapes:
                first = time_steps(engine, shape, 1, Sampling()).fastest_s
                steps = max(2, min(MOST_STEPS, int(SECONDS / first)))
                fastest = min(first, time_steps(engine, shape, steps, Sampling()).fastest_s)
                yield Point(curve, x, fastest / shape.batch, self._floor(model, shape, threads) / shape.batch)

    def _floor(self, model: Model, shape: StepShape, threads: int) -> float:
        """With fewer threads than were measured: the same bandwidth, their part of the arithmetic."""
        costs = step_cost(model.decode, shape.batch, shape.batch, [shape.context] * shape.batch)
        flops = self._machine.fma_gflops * 1e9 * threads / self._machine.threads
        return floor_seconds(costs, self._machine.read_bandwidth_gb_s * 1e9, flops)


def curves(bench: Bench, threads: int, wanted: Sequence[str]) -> Iterator[Point]:
    """All points, or those of the wanted curves."""
    model = bench.model()
    if "batch" in wanted:
        yield from bench.points("batch", model, [(n, StepShape(n, CONTEXT)) for n in BATCHES], threads)
    if "context" in wanted:
        yield from bench.points("context", model, [(n, StepShape(1, n)) for n in CONTEXTS], threads)
    for batch in (1, 16):
        shape = StepShape(batch, CONTEXT)
        if "experts" in wanted:
            for experts in EXPERTS:
                yield from bench.points(f"experts, batch {batch}", bench.model(experts), [(experts, shape)], threads)
        if "threads" in wanted:
            for n in THREADS:
                yield from bench.points(f"threads, batch {batch}", model, [(n, shape)], n)


def draw(points: Sequence[Point], path: Path) -> None:
    """Milliseconds a token over each curve's x, and the floors. Needs matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    kinds = list(dict.fromkeys(point.curve.partition(",")[0] for point in points))
    figure = Figure(figsize=(4 * len(kinds), 3.6), layout="constrained")
    for i, kind in enumerate(kinds):
        axes = figure.add_subplot(1, len(kinds), i + 1)
        for curve in dict.fromkeys(point.curve for point in points if point.curve.partition(",")[0] == kind):
            shown = [point for point in points if point.curve == curve]
            xs = [point.x for point in shown]
            (line,) = axes.plot(xs, [point.token_s * 1e3 for point in shown], "o-", label=curve)
            axes.plot(xs, [point.floor_s * 1e3 for point in shown], ":", color=line.get_color())
        axes.set_xscale("log", base=2)
        axes.set_xticks(xs, [str(x) for x in xs])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(kind)
        axes.set_ylabel("ms a token (dotted: floor)")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=__doc__)
    parser.add_argument("--curves", default="batch,context,experts,threads", help="only these, with commas between")
    parser.add_argument("--plot", action="store_true", help="draw build/bench/growth.png; needs matplotlib")
    arguments = parser.parse_args()
    machine = measure_machine()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(resolve_model(DEFAULT_MODEL), machine, Path(scratch))
        points = list(curves(bench, machine.threads, arguments.curves.split(",")))
    table = Table(title=f"reads {machine.read_bandwidth_gb_s} GB/s, {machine.fma_gflops} GFLOP/s")
    for column in ("curve", "x", "ms a token", "floor", "ratio"):
        table.add_column(column, justify="left" if column == "curve" else "right")
    for point in points:
        values = (f"{point.token_s * 1e3:.3f}", f"{point.floor_s * 1e3:.3f}", f"{point.token_s / point.floor_s:.2f}")
        table.add_row(point.curve, str(point.x), *values)
    Console().print(table)
    path = BUILD / "growth.json"
    path.write_text(json.dumps({**asdict(machine), "points": [asdict(point) for point in points]}, indent=2) + "\n")
    print(f"written to {path}")
    if arguments.plot:
        draw(points, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
