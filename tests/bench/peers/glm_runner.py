"""This engine under the driver: scheduler, loop and engine as the worker has them. CHECKPOINT THREADS."""

from __future__ import annotations

import statistics
import sys
from itertools import pairwise
from pathlib import Path

from tests.bench.engine import loaded
from tests.bench.peers.protocol import PROMPT, prompts, serve


def main() -> None:
    model, threads = Path(sys.argv[1]), int(sys.argv[2])
    with loaded(model, threads=threads) as (bench, load_s):
        vocab = bench.info.vocab

        def decode(batch: int, steps: int) -> float:
            _, arrivals, _ = bench.run(prompts(batch, PROMPT, vocab), steps + 1)
            full = [arrival.at for arrival in arrivals if arrival.tokens == batch]
            return statistics.fmean(b - a for a, b in pairwise(full))

        def prefill(tokens: int) -> float:
            start, arrivals, _ = bench.run(prompts(1, tokens, vocab), 1)
            return next(arrival.at for arrival in arrivals if arrival.tokens) - start

        serve(load_s, {"decode": decode, "prefill": prefill})


if __name__ == "__main__":
    main()
