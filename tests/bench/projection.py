"""A decode step of several GPUs from what one of them and two of them take, measured:
`python -m tests.bench.projection SLICE.json COLLECTIVES.json`.

Nothing here was run on 8 GPUs. The assumptions:
- Ranks compute as the rank slice did alone, and tokens choose experts evenly, but by chance: a sum waits for the rank
  that has the most experts to read. Each that it has more than the mean costs its bytes at the memory's bandwidth.
- Each norm that adds up its delta takes what it took on two GPUs, and the difference between a sum of the bytes that a
  rank then sends and one of those that it sends to one other. A rank that sends in two shots sends 2 (n-1)/n messages,
  in one shot n-1; times are those of two shots and of one shot on two GPUs, by bytes sent, drawn out in straight lines.
- Links of 8 GPUs do not get in each other's way: each pair has the whole bandwidth through the switch.
- Sampling exchanges what it exchanged on two GPUs, which the slice did not.
- Ranks begin a step as far apart as two GPUs' ranks did: SKEW_MS, what their steps took beyond all of the above.
- B200: what the slice takes at least, its floor, and the wait for experts shrink by the ratio of the memory's
  bandwidth, the rest not at all; what sums take by bytes shrinks by the ratio of the links' bandwidth, and their
  latency stays.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, ACT_BYTES = 5120, 92, 2
SUMS = 2 * LAYERS  # the norms that add up a delta: two a layer, without the first and with the head's
SAMPLE_EXCHANGES = 3  # of top-p
MEMORY = {"H100": 3.35, "H200": 4.8, "B200": 8.0}  # TB/s, data sheets
LINK_RATIO = 2.0  # NVLink 5, NVLink 4 of H100 and H200
HOP_BYTES = 768 * 1024  # kernels/cuda/all_reduce.cu
EXPERTS, TOP_K, EXPERT_LAYERS, EXPERT_BYTES = 160, 8, 89, 3 * 1536 * HIDDEN
SKEW_MS = 0.05
DRAWS = 400  # of a layer's choices


@dataclass(frozen=True)
class Line:
    """Microseconds of a sum by bytes sent."""

    bytes_sent: Sequence[float]
    microseconds: Sequence[float]

    def at(self, size: float) -> float:
        """Past the last of them as between the last two."""
        beyond = max(0.0, size - self.bytes_sent[-1])
        rise = (self.microseconds[-1] - self.microseconds[-2]) / (self.bytes_sent[-1] - self.bytes_sent[-2])
        return float(np.interp(size, self.bytes_sent, self.microseconds)) + rise * beyond

    def latency(self) -> float:
        return self.microseconds[0]


@dataclass(frozen=True)
class Measured:
    one_shot: Line
    two_shots: Line
    norms: dict[int, tuple[float, float]]  # rows: us without and with the sum

    def added_by_sum(self, rows: int, ranks: int) -> tuple[float, float]:
        """Microseconds that a norm takes longer for its sum: in all, and those of them that are latency."""
        message = rows * HIDDEN * ACT_BYTES
        saved = message * (ranks - 1) * (ranks - 2) / ranks
        line, sent = (
            (self.two_shots, 2 * message * (ranks - 1) / ranks)
            if saved > HOP_BYTES
            else (self.one_shot, message * (ranks - 1))
        )
        sizes = sorted(self.norms)
        plain, fused = (float(np.interp(rows, sizes, [self.norms[size][i] for size in sizes])) for i in (0, 1))
        added = fused - plain + line.at(sent) - self.one_shot.at(message)
        return added, min(added, line.latency())


def experts_waited_for(rows: int, ranks: int) -> float:
    """How many more experts than the mean the rank reads that reads the most."""
    rng = np.random.default_rng(rows)
    chosen = rng.random((DRAWS, rows, EXPERTS)).argpartition(TOP_K, axis=-1)[..., :TOP_K]
    touched = np.zeros((DRAWS, EXPERTS), bool)
    np.put_along_axis(touched, chosen.reshape(DRAWS, -1), True, axis=1)
    by_rank = touched.reshape(DRAWS, ranks, -1).sum(axis=-1)
    return float((by_rank.max(axis=-1) - by_rank.mean(axis=-1)).mean())


def read_collectives(path: Path) -> Measured:
    found = json.loads(path.read_text())
    if found["ranks"] != 2:
        raise SystemExit(f"{path}: of {found['ranks']} ranks, expected 2")
    lines = {}
    for name in ("one shot", "two shots"):
        sums = [one for one in found["sums"] if name in one["microseconds"]]
        lines[name] = Line([one["bytes"] for one in sums], [one["microseconds"][name] for one in sums])
    norms: dict[int, dict[bool, float]] = {}
    for one in found["exchanges"]:
        if "norm" in one["name"]:
            norms.setdefault(one["rows"], {})["all-reduce" in one["name"]] = one["microseconds"]
    pairs = {rows: (times[False], times[True]) for rows, times in norms.items()}
    return Measured(lines["one shot"], lines["two shots"], pairs)


def project(case: dict[str, Any], measured: Measured, ranks: int, gb_per_s: float, card: str) -> str:
    rows = case["shape"]["batch"]
    added, latency = measured.added_by_sum(rows, ranks)
    sums, sums_latency = SUMS * added / 1e3, SUMS * latency / 1e3
    sampling = SAMPLE_EXCHANGES * measured.one_shot.latency() / 1e3
    step, floor = case["device_s"] * 1e3, case["floor_s"] * 1e3
    waits = EXPERT_LAYERS * experts_waited_for(rows, ranks) * EXPERT_BYTES / gb_per_s / 1e6
    here = step + sums + waits + sampling + SKEW_MS
    b200 = (floor + waits) * MEMORY[card] / MEMORY["B200"] + step - floor + sampling + SKEW_MS
    b200 += sums_latency + (sums - sums_latency) / LINK_RATIO
    exchanges = sums + sampling + SKEW_MS
    return (
        f"| {case['name'].removeprefix('decode ')} | {step:.2f} ms | {added:.1f} us | {exchanges:.2f} ms "
        f"| {waits:.2f} ms | {here:.2f} ms | {rows / here * 1e3:,.0f} | {b200:.2f} ms | {rows / b200 * 1e3:,.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slice", type=Path, help="what tests.bench.rank_slice wrote")
    parser.add_argument("collectives", type=Path, help="what tests.bench.collectives wrote, of two ranks")
    asked = parser.parse_args()
    slices, measured = json.loads(asked.slice.read_text()), read_collectives(asked.collectives)
    card = next((name for name in MEMORY if name in slices["device"]), None)
    if card is None:
        raise SystemExit(f"{asked.slice}: of {slices['device']}, expected one of {', '.join(MEMORY)}")
    gpus = (f"8x{card}", "tokens/s", "8xB200", "tokens/s")
    heads = ("batch", "rank slice", "a sum adds", "all exchanges", "waits for experts", *gpus)
    print("".join(f"| {head} " for head in heads) + "|\n" + "|---" * len(heads) + "|")
    for case in slices["cases"]:
        if case["shape"]["decode"]:
            print(project(case, measured, slices["tp"], slices["read_gb_per_s"], card))


if __name__ == "__main__":
    main()
