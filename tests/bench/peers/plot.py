"""The comparison as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.load.plots import require_matplotlib
from tests.bench.peers.compare import Comparison


def draw(cases: Sequence[Comparison], peer: str, path: Path) -> None:
    """Each case's ratio, raw and per byte, and that of every pair. Needs matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(cases))
    axes.bar([x - 0.2 for x in places], [case.ratio for case in cases], 0.4, label="tokens/s")
    axes.bar([x + 0.2 for x in places], [case.ratio_per_byte for case in cases], 0.4, label="bytes/s")
    for x, case in zip(places, cases, strict=True):
        pairs = [peer / ours for ours, peer in zip(case.ours_s, case.peer_s, strict=True)]
        axes.plot([x - 0.2] * len(pairs), pairs, "k.", markersize=4)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(list(places), [case.name for case in cases])
    axes.set_ylabel(f"this engine / {peer}, medians of pairs")
    axes.legend()
    figure.savefig(path, dpi=110)
