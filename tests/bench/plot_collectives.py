"""Draws what collectives wrote: `python -m tests.bench.plot_collectives FILE.json FILE.png`. Needs matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from deploy.load.plots import require_matplotlib

STYLES = {
    "by size": ("o-", "tab:blue"),
    "two shots": ("--", "tab:cyan"),
    "in place": ("-.", "tab:purple"),
    "NCCL": ("s-", "tab:orange"),
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Times of a sum over the message's size."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for name, (style, colour) in STYLES.items():
        sums = [one for one in result["sums"] if name in one["microseconds"]]
        sizes = [one["bytes"] / 1024 for one in sums]
        label = {"by size": "this table", "NCCL": result["nccl"]}.get(name, f"this table, {name}")
        axes.plot(sizes, [one["microseconds"][name] for one in sums], style, color=colour, label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    sizes = [4**n for n in range(9)]
    axes.set_xticks(sizes, [f"{size} KB" if size < 1024 else f"{size // 1024} MB" for size in sizes])
    times = [2, 4, 8, 16, 32, 64, 128, 256]
    axes.set_yticks(times, [str(time) for time in times])
    axes.set_ylabel("us")
    axes.set_title(f"All-reduce of bf16 in a graph, {result['ranks']} ranks\n{result['device']}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)


if __name__ == "__main__":
    main()
