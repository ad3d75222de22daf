"""What several GPUs cost over one rank's computing: `python -m tests.bench.ranks --out FILE`.

Decode steps and a prefill of all ranks, with each exchange of tokens and experts, beside the same steps of rank 0
alone, which exchanges nothing, on the published shapes of GLM-4.7-FP8 with synthetic weights and as many layers as
asked for. Needs NumPy and the shared objects (GLM_LIBRARY_DIR), nothing else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from engine_worker.models import Parallelism
from engine_worker.models.exchange import Exchange, Exchanges
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine
from tests.bench.rank_slice import CONTEXT, STEPS, load

BATCHES = (1, 16, 64, 128, 256)


def step_times(layers: int, parallelism: Parallelism, exchange: Exchange, shapes: Sequence[StepShape]) -> list[float]:
    """Seconds of each step on the device, the slowest rank's."""
    model = load(layers, "fp8", parallelism, exchanges=Exchanges(exchange, exchange))
    with Engine.create(options_for(model, "cuda", list(shapes))) as engine:
        print(f"{engine.info().device}: {engine.info().weight_bytes_copied / 1e9:.1f} GB of weights", flush=True)
        return [time_steps(engine, shape, STEPS).device_s for shape in shapes]


def run(tp: int, layers: int, batches: Sequence[int], exchanges: Sequence[Exchange]) -> dict[str, Any]:
    shapes = [StepShape(batch, CONTEXT) for batch in batches]
    shapes.append(StepShape(1, CONTEXT, CONTEXT, decode=False))
    alone = step_times(layers, Parallelism(tp, tp, rank_slice=0), "replicate", shapes)
    together = {exchange: step_times(layers, Parallelism(tp, tp), exchange, shapes) for exchange in exchanges}
    cases = []
    for i, (shape, one) in enumerate(zip(shapes, alone, strict=True)):
        name = f"decode batch {shape.batch}" if shape.decode else f"prefill {shape.new}"
        ranks = {exchange: seconds[i] for exchange, seconds in together.items()}
        milliseconds = {exchange: seconds * 1e3 for exchange, seconds in ranks.items()}
        overhead = {exchange: seconds / one - 1 for exchange, seconds in ranks.items()}
        cases.append({"name": name, "rank_slice_ms": one * 1e3, "ranks_ms": milliseconds, "overhead": overhead})
        columns = "; ".join(f"{key} {milliseconds[key]:.3f} ms, {overhead[key]:+.1%}" for key in ranks)
        print(f"{name}: {one * 1e3:.3f} ms alone; {tp} ranks: {columns}", flush=True)
    return {"tp": tp, "layers": layers, "context": CONTEXT, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="of the model's 92, the first 3 of them dense")
    parser.add_argument("--batch", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--exchange", nargs="*", choices=get_args(Exchange), default=get_args(Exchange))
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args()
    result = run(arguments.tp, arguments.layers, arguments.batch, arguments.exchange)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
