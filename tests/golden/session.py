"""Runs golden checkpoints through the native engine and reads the logits of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_worker.models import KvDtypeSetting, build_model
from engine_worker.plan.dump import dump
from engine_worker.runtime.abi import PAGE_SIZE, Engine, kernel_table_path
from engine_worker.runtime.records import EngineOptions, Sampling, StepBatch

MAX_CONTEXT = 64
SLOTS = 2
PAGES_A_SLOT = MAX_CONTEXT // PAGE_SIZE

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]


class Session:
    """One engine; each call runs one sequence from its first token."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self._engine = engine
        self._vocab = vocab

    def prefill(self, tokens: Tokens, chunks: Sequence[int] | None = None, slot: int = 0) -> Logits:
        """[vocab]: the logits after the last token, the prompt being fed in `chunks` (all at once by default)."""
        sizes = [len(tokens)] if chunks is None else list(chunks)
        assert sum(sizes) == len(tokens)
        self._start(slot)
        begin = 0
        for size in sizes:
            end = begin + size
            self._step(slot, tokens[begin:end], begin, sampled=end == len(tokens))
            begin = end
        return self._logits()

    def decode(self, tokens: Tokens, slot: int = 0) -> Logits:
        """[tokens][vocab]: the logits after each token, fed one at a time."""
        self._start(slot)
        rows = []
        for position in range(len(tokens)):
            self._step(slot, tokens[position : position + 1], position, sampled=True)
            rows.append(self._logits())
        return np.stack(rows)

    def _logits(self) -> Logits:
        row: Logits = self._engine.read_buffer("logits", (1, self._vocab), np.float32)[0]
        return row

    def _start(self, slot: int) -> None:
        """Greedy, with nothing that would change the logits."""
        none = np.empty(0, np.int32)
        self._engine.release_slot(slot)
        self._engine.bind_slot(slot, Sampling(), none, none)

    def _step(self, slot: int, tokens: Tokens, position: int, *, sampled: bool) -> None:
        end = position + len(tokens)
        pages = range(-(-position // PAGE_SIZE), -(-end // PAGE_SIZE))
        # Backwards, so that a page's id and its place in the sequence differ.
        updates = [(slot, index, (slot + 1) * PAGES_A_SLOT - 1 - index) for index in pages]
        self._engine.submit(
            StepBatch(
                token_ids=np.ascontiguousarray(tokens),
                positions=np.arange(position, end, dtype=np.int32),
                seq_slots=np.array([slot], np.int32),
                seq_starts=np.array([0, len(tokens)], np.int32),
                sample_rows=np.array([len(tokens) - 1] if sampled else [], np.int32),
                page_updates=np.array(updates, np.int32).reshape(-1, 3),
            )
        )
        self._engine.collect()


@contextmanager
def open_session(directory: Path, kv_dtype: KvDtypeSetting = "auto", num_threads: int = 1) -> Iterator[Session]:
    model = build_model(directory, kv_dtype)
    options = EngineOptions(
        kernels_path=kernel_table_path("cpu"),
        mixed_plan=dump(model.mixed),
        decode_plan=dump(model.decode),
        tensors=model.tensors,
        max_rows=MAX_CONTEXT,
        max_samples=SLOTS,
        max_slots=SLOTS,
        max_context=MAX_CONTEXT,
        num_pages=SLOTS * PAGES_A_SLOT,
        num_threads=num_threads,
    )
    with Engine.create(options) as engine:
        yield Session(engine, model.config.vocab_size)


def relative_error(found: Logits, expected: Logits) -> NDArray[np.float32]:
    """|found - expected| / |expected| of each row, in 2-norms."""
    error: NDArray[np.float32] = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return error
