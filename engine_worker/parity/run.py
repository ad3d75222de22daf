"""A whole comparison of two tables: prompts in one step, then decode steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine_worker.models import Model
from engine_worker.parity.lockstep import Lockstep, OpError, bind_greedy_and_seeded, sequence_steps
from engine_worker.plan.dump import dump
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.records import EngineOptions, Int32Array, RankOptions


@dataclass(frozen=True, slots=True)
class Table:
    """A kernel table and the device that it opens."""

    path: Path
    device_ordinal: int = 0


def random_prompts(count: int, length: int, vocab: int) -> list[Int32Array]:
    """Of `length` tokens, less one for each prompt before it, at least 1."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, max(1, length - i), np.int32) for i in range(count)]


def run_parity(
    model: Model, reference: Table, tested: Table, prompts: Sequence[Int32Array], decodes: int
) -> Iterator[OpError]:
    """Yields the error of each op's outputs; raises ParityError at the first op that differs.

    Of the model's first rank: of several it must be a rank slice.
    """
    with ExitStack() as stack:
        engines = []
        for table in (reference, tested):
            engine = stack.enter_context(Engine.create(options_of(model, table, prompts, decodes)))
            bind_greedy_and_seeded(engine, len(prompts))
            engines.append(engine)
        lockstep = Lockstep(model, *engines)
        for batch in sequence_steps(prompts, decodes):
            yield from lockstep.run(batch)


def worst_of_each_kind(errors: Sequence[OpError]) -> list[OpError]:
    """In order of first call."""
    worst: dict[str, OpError] = {}
    for found in errors:
        if found.kind not in worst or found.difference.error > worst[found.kind].difference.error:
            worst[found.kind] = found
    return list(worst.values())


def options_of(model: Model, table: Table, prompts: Sequence[Int32Array], decodes: int) -> EngineOptions:
    """What holds the steps of `run_parity`."""
    lengths = [len(prompt) for prompt in prompts]
    pages = -(-(max(lengths) + decodes) // PAGE_SIZE)
    return EngineOptions(
        kernels_path=table.path,
        ranks=[RankOptions(dump(model.mixed), dump(model.decode), table.device_ordinal)],
        tensors=model.tensors,
        max_rows=sum(lengths),
        max_samples=len(prompts),
        max_slots=len(prompts),
        max_context=pages * PAGE_SIZE,
        num_pages=pages * len(prompts),
    )
