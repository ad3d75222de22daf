"""Prefill and decode of a running system, each by itself, through the public API."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.errors import DeployError
from deploy.load.arrivals import Arrival
from deploy.load.client import LoadClient, Sample, connected
from deploy.load.plots import require_matplotlib
from deploy.local import LocalOptions
from deploy.models.progress import Progress, silent

_STEP_TOKENS = 512  # the worker's own default
_WARM_UP = Arrival(0.0, 16, 4)


@dataclass(frozen=True)
class Cases:
    """Prompts of these lengths, one at a time; this many sequences at once, of `output_tokens` behind `context`.

    By default what any worker takes that was started without further settings.
    """

    prefill_tokens: Sequence[int] = (128, 1024, 4080)
    batches: Sequence[int] = (1, 4, 16, 64)
    context: int = 1024
    output_tokens: int = 128
    repeats: int = 3


def pair_for(directory: Path, cases: Cases, worker_args: Sequence[str]) -> LocalOptions:
    """A worker of the checkpoint `directory` with room for the cases, and a router that lets them wait."""
    from engine_worker.runtime.c_types import PAGE_SIZE  # noqa: PLC0415 - not where only a target is asked

    decoded = Arrival(0.0, cases.context, cases.output_tokens)
    shapes = (_WARM_UP, decoded, *(Arrival(0.0, tokens, 1) for tokens in cases.prefill_tokens))
    longest, running = max(shape.prompt_tokens + shape.output_tokens for shape in shapes), max(cases.batches)
    room = {
        "--max-context": -(-longest // PAGE_SIZE) * PAGE_SIZE,
        "--max-running": running,
        "--step-tokens": max(_STEP_TOKENS, 2 * running),
    }
    args = [text for flag, value in room.items() for text in (flag, str(value))]
    router_args = ("--max-queue-s", "3600")
    return LocalOptions(directory, worker_args=[*worker_args, *args], router_args=router_args, start_seconds=3600.0)


async def benchmark(address: str, cases: Cases, progress: Progress = silent) -> dict[str, Any]:
    """Of the router at `address`, on which nothing else runs.

    Prefill: prompt tokens over time to first token, median. Decode: the sum over the sequences of 1 / (mean time per
    token after the first), so neither prefill nor a sequence's wait for its turn counts. DeployError: a request failed.
    """
    async with connected(address, 1, seed=0, prefix_tokens=0) as client:
        await _run(client, _WARM_UP, 1)
        total = len(cases.prefill_tokens) + len(cases.batches)
        prefill, decode = [], []
        for number, tokens in enumerate(cases.prefill_tokens):
            progress(f"prefill of {tokens}", number, total)
            runs = [await _run(client, Arrival(0.0, tokens, 1), 1) for _ in range(cases.repeats)]
            prefill.append(prefill_case(tokens, [samples[0] for samples in runs]))
        for number, batch in enumerate(cases.batches, len(cases.prefill_tokens)):
            progress(f"decode, batch {batch}", number, total)
            shape = Arrival(0.0, cases.context, cases.output_tokens)
            decode.append(decode_case(batch, [await _run(client, shape, batch) for _ in range(cases.repeats)]))
    return {"cases": asdict(cases), "prefill": prefill, "decode": decode}


def prefill_case(tokens: int, samples: Sequence[Sample]) -> dict[str, float]:
    """Figures of prompts of one length."""
    ttft = statistics.median(sample.ttft_s for sample in samples if sample.ttft_s is not None)
    return {"prompt_tokens": tokens, "ttft_ms": round(ttft * 1000, 3), "tokens_per_s": round(tokens / ttft, 1)}


def decode_case(batch: int, runs: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Figures of runs of `batch` sequences each."""
    rates = [sum(1 / sample.seconds_per_token for sample in run if sample.seconds_per_token) for run in runs]
    rate = statistics.median(rates)
    return {"batch": batch, "tokens_per_s": round(rate, 1), "ms_per_token": round(1000 * batch / rate, 3)}


async def _run(client: LoadClient, shape: Arrival, concurrency: int) -> list[Sample]:
    """Each of `concurrency` users sends one request."""
    samples = await client.run_closed(shape, concurrency, seconds=0.0)
    failed = [sample.status for sample in samples if sample.status != "OK"]
    if failed:
        raise DeployError(
            f"{len(failed)} of {concurrency} requests of {shape.prompt_tokens} + {shape.output_tokens} tokens failed: "
            f"{failed[0]}. Fit prompt lengths and batches to what the worker was started with"
        )
    return samples


def draw_scaling(report: dict[str, Any], directory: Path) -> list[Path]:
    """Write decode over batch and prefill over prompt length as PNG files; their paths."""
    require_matplotlib()
    from matplotlib import pyplot as plt  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, key in (("decode", "batch"), ("prefill", "prompt_tokens")):
        figure, axes = plt.subplots(figsize=(6, 4))
        axes.plot([case[key] for case in report[name]], [case["tokens_per_s"] for case in report[name]], marker="o")
        axes.set(xscale="log", xlabel=key.replace("_", " "), ylabel="tokens/s", ylim=(0, None), title=name)
        axes.grid(visible=True, alpha=0.3)
        figure.tight_layout()
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths
