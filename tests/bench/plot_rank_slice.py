"""Draws what rank_slice wrote: `python -m tests.bench.plot_rank_slice FILE.json FILE.png`. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.load.plots import require_matplotlib

COLOURS = {"bf16": "tab:blue", "fp8": "tab:orange"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Decode: the step's time over the batch, and its floor."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for kv_dtype, colour in COLOURS.items():
        cases = [case for case in result["cases"] if case["kv_dtype"] == kv_dtype and case["shape"]["decode"]]
        batches = [case["shape"]["batch"] for case in cases]
        axes.plot(batches, [case["device_s"] * 1e3 for case in cases], "o-", color=colour, label=f"step, {kv_dtype} KV")
        axes.plot(batches, [case["floor_s"] * 1e3 for case in cases], ":", color=colour, label=f"floor, {kv_dtype} KV")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({case["shape"]["batch"] for case in result["cases"] if case["shape"]["decode"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    times = [1, 2, 4, 8, 16, 32, 64]
    axes.set_yticks(times, [str(time) for time in times])
    axes.set_xlabel("sequences, each of 4,096 tokens")
    axes.set_ylabel("ms")
    axes.set_title(
        f"GLM-4.7-FP8, rank 0 of TP{result['tp']}, {result['layers']} layers\n{result['device']}", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
