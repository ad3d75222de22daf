"""One rank's share of GLM-4.7-FP8, all layers, on one GPU: `python -m tests.bench.rank_slice --out FILE`.

The shapes are those of the published config.json; weights are synthetic and the exchanges between ranks are left out,
so that the figures are those of one rank's computing. Decode runs at a fixed context over pages that were filled with
random keys and values instead of a prefill, each sequence with pages of its own. Each step stands beside its floor,
op by op: the plan's bytes at the bandwidth at which this card just read memory, or the FLOPs at the data sheet's peak
where those take longer. Needs NumPy and the shared objects (GLM_LIBRARY_DIR), nothing else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_worker.models import Model, Parallelism, build_model
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.plan.cost import OpCost, step_cost
from engine_worker.profile.ops import OpTime, profile_ops
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine, Library, kernel_table_path

CONFIG = Path(__file__).with_name("data") / "glm-4.7-fp8.config.json"
PEAK_FLOPS = 1979e12  # FP8, dense: data sheet of the H100 SXM
CONTEXT = 4096
STEPS = 20


@dataclass(frozen=True)
class Case:
    name: str
    kv_dtype: str
    shape: StepShape


CASES = (
    *(Case(f"decode batch {batch}", "bf16", StepShape(batch, CONTEXT)) for batch in (1, 4, 16, 32, 64)),
    *(Case(f"prefill {tokens}", "bf16", StepShape(1, tokens, tokens, decode=False)) for tokens in (1024, 4096)),
    *(Case(f"decode batch {batch}, FP8 KV", "fp8", StepShape(batch, CONTEXT)) for batch in (64, 128, 256)),
)


def load(
    layers: int,
    kv_dtype: Any,
    parallelism: Parallelism,
    *,
    quantized: bool = True,
    exchanges: Exchanges = REPLICATED,
) -> Model:
    """`quantized`: FP8 as published; else bf16."""
    config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": layers}
    if not quantized:
        del config["quantization_config"]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        return build_model(Path(directory), kv_dtype, parallelism, synthetic_seed=0, exchanges=exchanges)


def run_case(engine: Engine, model: Model, case: Case, bytes_per_s: float) -> dict[str, Any]:
    """The step, and the profile of its ops."""

    def floor(cost: OpCost) -> float:
        return max(cost.total_bytes / bytes_per_s, cost.flops / PEAK_FLOPS)

    shape = case.shape
    plan = shape.plan(model)
    times = time_steps(engine, shape, STEPS if shape.decode else 3)
    costs = step_cost(plan, shape.rows, shape.batch, [shape.context] * shape.batch)
    floor_s = sum(floor(cost) for cost in costs)
    ops = profile_ops(engine, plan, shape, floor, recorded=shape.decode, repeats=3)
    result = {
        **asdict(case),
        **asdict(times),
        "gap_us": times.gap_s * 1e6,
        "floor_s": floor_s,
        "ratio": times.device_s / floor_s,
        "tokens_per_s": shape.rows / times.wall_s,
        "step_gigabytes": sum(cost.total_bytes for cost in costs) / 1e9,
        "step_teraflops": sum(cost.flops for cost in costs) / 1e12,
        "ops": [op_record(op) for op in ops],
    }
    print(
        f"{case.name}: {times.device_s * 1e3:.3f} ms, floor {floor_s * 1e3:.3f} ms, ratio {result['ratio']:.2f}, "
        f"gap {times.gap_s * 1e6:.0f} us; ops {sum(op.seconds for op in ops) * 1e3:.3f} ms",
        flush=True,
    )
    for op in sorted(ops, key=lambda op: -op.seconds)[:14]:
        print(f"  {op.cost.label:32} {op.seconds * 1e6:9.1f} us  {op.gigabytes_per_s:7.0f} GB/s  x{op.ratio:.2f}")
    return result


def op_record(op: OpTime) -> dict[str, Any]:
    return {
        "op": op.cost.label,
        "calls": op.cost.calls,
        "us": op.seconds * 1e6,
        "us_a_call": op.seconds * 1e6 / op.cost.calls,
        "megabytes": op.cost.total_bytes / 1e6,
        "gigaflops": op.cost.flops / 1e9,
        "gb_per_s": op.gigabytes_per_s,
        "tflop_per_s": op.gigaflops / 1e3,
        "ratio": op.ratio,
    }


def run(cases: Sequence[Case], layers: int, parallelism: Parallelism) -> dict[str, Any]:
    bytes_per_s = Library().read_bandwidth(kernel_table_path("cuda"))
    print(f"reads {bytes_per_s / 1e9:.0f} GB/s", flush=True)
    result: dict[str, Any] = {"read_gb_per_s": bytes_per_s / 1e9, "layers": layers, **asdict(parallelism), "cases": []}
    for kv_dtype in dict.fromkeys(case.kv_dtype for case in cases):
        chosen = [case for case in cases if case.kv_dtype == kv_dtype]
        start = time.perf_counter()
        model = load(layers, kv_dtype, parallelism)
        options = options_for(model, "cuda", [case.shape for case in chosen])
        planned = time.perf_counter()
        with Engine.create(options) as engine:
            info = engine.info()
            loaded = time.perf_counter()
            print(
                f"{info.device}: planned in {planned - start:.1f} s, made in {loaded - planned:.1f} s: weights "
                f"{info.weight_bytes_copied / 1e9:.2f} GB, KV {info.kv_bytes / 1e9:.2f} GB, "
                f"scratch {info.scratch_bytes / 1e9:.2f} GB",
                flush=True,
            )
            result["device"] = info.device
            result[f"made_s_{kv_dtype}_kv"] = loaded - planned
            result[f"weight_gb_{kv_dtype}_kv"] = info.weight_bytes_copied / 1e9
            result["cases"] += [run_case(engine, model, case, bytes_per_s) for case in chosen]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=92, help="of the model's 92")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--only", default="", help="cases whose name has this")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only in case.name]
    parallelism = Parallelism(tp=arguments.tp, ep=arguments.tp, rank_slice=0)
    result = run(cases, arguments.layers, parallelism)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
