"""The comparison as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from tests.bench.peers.compare import Comparison
from tests.bench.peers.environment import ROOT
from tests.bench.peers.protocol import Answer


@dataclass(frozen=True)
class Measured:
    """Of one peer. loads: pairs of seconds, ours first; memory: ours, the peer's."""

    cases: list[Comparison]
    loads: list[tuple[float, float]]
    memory: list[Answer]


def report(peer: str, found: Measured, threads: int) -> None:
    """Print it and write build/peers/PEER.json."""
    console = Console()
    console.print(_table(peer, found, threads))
    for i, name in enumerate(("ours", peer)):
        load, memory = min(pair[i] for pair in found.loads), found.memory[i]
        console.print(
            f"{name}: load {load:.2f} s, peak {memory['peak_mb']:.0f} MB, private {memory['private_mb']:.0f} MB"
        )
    for case in found.cases:
        ours, theirs = case.our_work, case.peer_work
        console.print(
            f"{case.name}: a step takes {ours.bytes / 1e6:.0f} and {theirs.bytes / 1e6:.0f} MB, "
            f"{ours.flops / 1e9:.2f} and {theirs.flops / 1e9:.2f} GFLOP",
            highlight=False,
        )
    path = ROOT / f"{peer}.json"
    path.write_text(json.dumps(_record(peer, found, threads), indent=2) + "\n")
    console.print(f"written to {path}")


def _table(peer: str, found: Measured, threads: int) -> Table:
    table = Table(title=f"this engine and {peer}, {threads} threads, medians of {len(found.loads)} pairs")
    for column in ("case", "ours, tokens/s", peer, "ratio", "per byte", "per FLOP"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in found.cases:
        ours, theirs = case.tokens_per_s()
        ratios = (case.ratio, case.ratio_per_byte, case.ratio_per_flop)
        table.add_row(case.name, f"{ours:.1f}", f"{theirs:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    return table


def _record(peer: str, found: Measured, threads: int) -> dict[str, object]:
    cases = [
        asdict(case)
        | {"ratio": case.ratio, "ratio_per_byte": case.ratio_per_byte, "ratio_per_flop": case.ratio_per_flop}
        for case in found.cases
    ]
    loads = [{"ours": ours, "peer": theirs} for ours, theirs in found.loads]
    return {"peer": peer, "threads": threads, "cases": cases, "load_s": loads, "memory": found.memory}
