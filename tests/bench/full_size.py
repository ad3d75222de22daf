"""GLM-4.7-FP8 on all GPUs of a host: `python -m tests.bench.full_size --gpus 8 --out DIRECTORY`, in one ten-minute run.

All ranks of one engine, exchanges included, synthetic weights of the published shapes, made by all ranks in parallel.
First the layout is checked: a model of a few layers in bf16 says the same on all GPUs as on one. Then prefill and
decode, each step beside the floor of a rank; last, the ops of one rank, without exchanges. With fewer GPUs, `--layers`
says how many of the 92 layers fit. Needs NumPy and the shared objects (GLM_LIBRARY_DIR).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from engine_worker.models import Model, Parallelism
from engine_worker.plan.cost import floor_seconds, step_cost
from engine_worker.profile.shape import StepShape, bind, first_batch, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine, Library, kernel_table_path
from engine_worker.runtime.records import Sampling, StepResult
from tests.bench import rank_slice
from tests.bench.rank_slice import PEAK_FLOPS, Case, load

CHECK_LAYERS = 5
# Prefill: pages filled with random keys would differ between layouts.
CHECK_SHAPE = StepShape(batch=64, context=16, new=16, decode=False)
# Of a random model in bf16: rounding in another order moves a few sequences to other experts, more to the other of two
# near logits; hence the median. FP8 has a scale for each shard of a row, so that layouts differ by more.
LEAST_AGREEMENT = 0.8
MEDIAN_LOGPROB_DIFFERENCE = 0.05
STEPS = 20


def cases(contexts: Sequence[int], prefills: Sequence[int]) -> list[Case]:
    """Decode at each context, with both dtypes of K and V, and prefill."""
    return [
        Case(f"decode batch {batch}, context {context}, {kv} KV", kv, StepShape(batch, context))
        for kv in ("bf16", "fp8")
        for context in contexts
        for batch in (1, 16, 64, 128, 256)
    ] + [Case(f"prefill {tokens}", "bf16", StepShape(1, tokens, tokens, decode=False)) for tokens in prefills]


def fits(model: Model, case: Case, memory: float) -> bool:
    """Whether pages of the case fit `memory` bytes of a rank."""
    kv = model.decode.kv
    element = 1 if case.kv_dtype == "fp8" else 2
    return case.shape.batch * case.shape.context * kv.layers * 2 * kv.kv_heads * kv.head_dim * element <= memory


def say(parallelism: Parallelism) -> StepResult:
    """Greedy ids and their log-probabilities, one a sequence."""
    model = load(CHECK_LAYERS, "bf16", parallelism, quantized=False)
    with Engine.create(options_for(model, "cuda", [CHECK_SHAPE])) as engine:
        bind(engine, CHECK_SHAPE, Sampling(temperature=0.0, num_logprobs=0))
        engine.submit(first_batch(CHECK_SHAPE, engine.info().vocab))
        return engine.collect()


def check_layout(gpus: int) -> dict[str, float]:
    """All GPUs against one. Raises AssertionError: they compute something else."""
    alone, together = say(Parallelism(1, 1)), say(Parallelism(gpus, gpus))
    same = alone.token_ids == together.token_ids
    difference = float(np.median(np.abs(alone.logprobs - together.logprobs)[same]))
    agreement = float(same.mean())
    print(
        f"{gpus} GPUs against one, {CHECK_LAYERS} layers: {agreement:.0%} of tokens, log-probabilities {difference:.3f}"
    )
    assert agreement >= LEAST_AGREEMENT, f"{agreement:.0%} of tokens agree, expected {LEAST_AGREEMENT:.0%}"
    assert difference <= MEDIAN_LOGPROB_DIFFERENCE, f"log-probabilities differ by {difference:.3f}"
    return {"agreement": agreement, "logprob_difference": difference}


def run_case(engine: Engine, model: Model, case: Case, bytes_per_s: float) -> dict[str, Any]:
    shape = case.shape
    times = time_steps(engine, shape, STEPS if shape.decode else 3)
    costs = step_cost(shape.plan(model), shape.rows, shape.batch, [shape.context] * shape.batch)
    floor_s = floor_seconds(costs, bytes_per_s, PEAK_FLOPS)
    return {
        **asdict(case),
        **asdict(times),
        "floor_s": floor_s,
        "ratio": times.device_s / floor_s,
        "tokens_per_s": shape.rows / times.wall_s,
    }


def run(gpus: int, layers: int, contexts: Sequence[int], prefills: Sequence[int], kv_memory: float) -> dict[str, Any]:
    bytes_per_s = Library().read_bandwidth(kernel_table_path("cuda"))
    parallelism = Parallelism(gpus, gpus)
    result: dict[str, Any] = {"gpus": gpus, "layers": layers, "read_gb_per_s": bytes_per_s / 1e9, "cases": []}
    result["check"] = check_layout(gpus) if gpus > 1 else None
    for kv_dtype in ("bf16", "fp8"):
        model = load(layers, kv_dtype, parallelism)
        chosen = [case for case in cases(contexts, prefills) if case.kv_dtype == kv_dtype]
        chosen = [case for case in chosen if fits(model, case, kv_memory)]
        begun = time.perf_counter()
        with Engine.create(options_for(model, "cuda", [case.shape for case in chosen])) as engine:
            result["device"] = engine.info().device
            result[f"made_s_{kv_dtype}_kv"] = time.perf_counter() - begun
            for case in chosen:
                result["cases"].append(run_case(engine, model, case, bytes_per_s))
                print(row(result["cases"][-1]), flush=True)
    return result


def row(case: dict[str, Any]) -> str:
    """One line of the table."""
    return (
        f"{case['name']:40} {case['device_s'] * 1e3:9.3f} ms  floor {case['floor_s'] * 1e3:8.3f} ms  "
        f"x{case['ratio']:.2f}  {case['tokens_per_s']:9.0f} tokens/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=92, help="of the model's 92")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--prefills", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--kv-gigabytes", type=float, default=26.0, help="of a rank; cases beyond are left out")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = run(arguments.gpus, arguments.layers, arguments.contexts, arguments.prefills, arguments.kv_gigabytes * 1e9)
    slice_case = Case("decode batch 64", "bf16", StepShape(64, arguments.contexts[0]))
    sliced = Parallelism(arguments.gpus, arguments.gpus, rank_slice=0)
    result["rank_alone"] = rank_slice.run([slice_case], arguments.layers, sliced)
    (arguments.out / "full_size.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{arguments.gpus} x {result['device']}, {arguments.layers} layers")
    for case in result["cases"]:
        print(row(case))


if __name__ == "__main__":
    main()
