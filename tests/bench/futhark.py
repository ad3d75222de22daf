"""The Futhark table beside the table in C++ or CUDA, op by op: `python -m tests.bench.futhark [--cuda] DIR`.

Each line is a kind of op, all its calls in one step together, in microseconds, and how many times longer Futhark takes.
DIR is a checkpoint, or has only config.json: weights are then made up. Needs `make futhark`, with --cuda also
FUTHARK_BACKEND=cuda.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from engine_worker.models import Model
from engine_worker.profile.report import profile_step
from engine_worker.profile.shape import StepShape
from tests.golden.parity_check import load

SHAPES = {
    "decode 1 x 128": StepShape(1, 128),
    "decode 16 x 128": StepShape(16, 128),
    "prefill of 128": StepShape(1, 128, 128, decode=False),
}


def seconds_by_kind(model: Model, shape: StepShape, table: str, threads: int) -> dict[str, float]:
    """The whole step as "step"."""
    found = profile_step(model, shape, table, num_threads=threads)
    seconds: defaultdict[str, float] = defaultdict(float, step=found.step.device_s)
    for op in found.ops:
        seconds[op.cost.kind] += op.seconds
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    model = load(asked.model)
    native, futhark = ("cuda", "futhark_cuda") if asked.cuda else ("cpu", "futhark")
    for name, shape in SHAPES.items():
        beside = seconds_by_kind(model, shape, native, asked.threads)
        tested = seconds_by_kind(model, shape, futhark, asked.threads)
        print(f"\n{name:20} {native + ' us':>12} {futhark + ' us':>16} {'ratio':>8}")
        for kind, seconds in tested.items():
            print(f"{kind:20} {beside[kind] * 1e6:12.1f} {seconds * 1e6:16.1f} {seconds / beside[kind]:8.2f}")


if __name__ == "__main__":
    main()
