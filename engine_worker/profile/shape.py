"""Steps of a chosen shape, on an engine whose KV pages nobody has to fill."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine_worker.device import on_gpu
from engine_worker.models import Model
from engine_worker.plan.record import Plan
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, Sampling, StepBatch

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StepShape:
    """`batch` sequences, each `context` tokens long after the step, which computes the last `new` of them.

    Decode: new = 1, by the decode plan.
    """

    batch: int
    context: int
    new: int = 1
    decode: bool = True

    @property
    def rows(self) -> int:
        return self.batch * self.new

    def plan(self, model: Model) -> Plan:
        return model.decode if self.decode else model.mixed


def pages_of(context: int) -> int:
    return -(-context // PAGE_SIZE)


def options_for(
    model: Model, table: str, shapes: list[StepShape], *, device_ordinal: int = 0, num_threads: int = 0
) -> EngineOptions:
    """An engine of the model's ranks that just holds each of the shapes, its pages with random keys and values.

    On GPUs the ranks take one each, from `device_ordinal` on.
    """
    context = PAGE_SIZE * max(pages_of(shape.context) for shape in shapes)
    batch = max(shape.batch for shape in shapes)
    return EngineOptions(
        kernels_path=kernel_table_path(table),
        ranks=rank_options(model, device_ordinal if on_gpu(table) else None),
        tensors=model.tensors,
        max_rows=max(shape.rows for shape in shapes),
        max_samples=batch,
        max_slots=batch,
        max_context=context,
        num_pages=max(shape.batch * pages_of(shape.context) for shape in shapes),
        random_kv=True,
        num_threads=num_threads,
    )


def bind(engine: Engine, shape: StepShape, sampling: Sampling) -> None:
    """Give the first slots to the shape's sequences, each with a seed of its own: they must not all say the same."""
    for slot in range(shape.batch):
        engine.release_slot(slot)
        engine.bind_slot(slot, replace(sampling, seed=slot), _NO_TOKENS, _NO_TOKENS)


def first_batch(shape: StepShape, vocab: int, seed: int = 0) -> StepBatch:
    """A step on random tokens, with all pages of its sequences. Each sequence has pages of its own."""
    pages = pages_of(shape.context)
    slots, indices = np.divmod(np.arange(shape.batch * pages, dtype=np.int32), pages)
    positions = np.arange(shape.context - shape.new, shape.context, dtype=np.int32)
    starts = np.arange(0, shape.rows + 1, shape.new, dtype=np.int32)
    return StepBatch(
        token_ids=np.random.default_rng(seed).integers(0, vocab, shape.rows, np.int32),
        positions=np.tile(positions, shape.batch),
        seq_slots=np.arange(shape.batch, dtype=np.int32),
        seq_starts=starts,
        sample_rows=starts[1:] - 1,
        page_updates=np.stack([slots, indices, np.arange(len(slots), dtype=np.int32)], axis=1),
        decode=shape.decode,
    )


def next_batch(shape: StepShape) -> StepBatch:
    """A decode step at the same context once more, on the tokens that the one before sampled."""
    batch = first_batch(shape, 1)
    return StepBatch(
        token_ids=np.full(shape.rows, -1, np.int32),
        positions=batch.positions,
        seq_slots=batch.seq_slots,
        seq_starts=batch.seq_starts,
        sample_rows=batch.sample_rows,
        decode=True,
    )
