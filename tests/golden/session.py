"""Runs golden checkpoints through the native engine and reads the logits of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine_worker.models import KvDtypeSetting, build_model
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, Sampling, StepBatch
from tests.golden.table import MAX_CONTEXT, TABLE

SLOTS = 2
PAGES_A_SLOT = MAX_CONTEXT // PAGE_SIZE

Logits = NDArray[np.float32]
Tokens = NDArray[np.int32]
GREEDY = Sampling()
NO_TOKENS: Tokens = np.empty(0, np.int32)


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of the sequence in `slot`, the first at `position`.

    The last one's logits are wanted if `sampled`.
    """

    slot: int
    tokens: Tokens
    position: int
    sampled: bool = True


class Session:
    """One engine. `prefill` and `decode` run a sequence from its first token; `start` and `step` are their parts."""

    def __init__(self, engine: Engine, vocab: Sequence[int]) -> None:
        """`vocab`: the tokens whose logits each rank has."""
        self._engine = engine
        self._vocab = vocab
        self.sampled = NO_TOKENS  # of the newest step

    def prefill(self, tokens: Tokens, chunks: Sequence[int] | None = None, slot: int = 0) -> Logits:
        """[vocab]: the logits after the last token, the prompt being fed in `chunks` (all at once by default)."""
        self.start(slot)
        begin = 0
        for size in [len(tokens)] if chunks is None else chunks:
            end = begin + size
            logits = self.step(Piece(slot, tokens[begin:end], begin, sampled=end == len(tokens)))
            begin = end
        row: Logits = logits[0]
        return row

    def decode(self, tokens: Tokens, slot: int = 0) -> Logits:
        """[tokens][vocab]: the logits after each token, fed one at a time."""
        self.start(slot)
        return np.concatenate([self.step(Piece(slot, tokens[i : i + 1], i), decode=True) for i in range(len(tokens))])

    def start(self, slot: int, sampling: Sampling = GREEDY) -> None:
        """Begin a sequence; by default with nothing that would change the logits."""
        self._engine.release_slot(slot)
        self._engine.bind_slot(slot, sampling, NO_TOKENS, NO_TOKENS)

    def step(self, *pieces: Piece, decode: bool = False) -> Logits:
        """[sampled pieces][vocab]; by the decode plan if `decode`."""
        starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)], dtype=np.int32)
        updates = [update for piece in pieces for update in _page_updates(piece)]
        sample_rows = [end - 1 for piece, end in zip(pieces, starts[1:], strict=True) if piece.sampled]
        self._engine.submit(
            StepBatch(
                token_ids=np.concatenate([piece.tokens for piece in pieces]),
                positions=np.concatenate(
                    [np.arange(piece.position, piece.position + len(piece.tokens), dtype=np.int32) for piece in pieces]
                ),
                seq_slots=np.array([piece.slot for piece in pieces], np.int32),
                seq_starts=starts,
                sample_rows=np.array(sample_rows, np.int32),
                page_updates=np.array(updates, np.int32).reshape(-1, 3),
                decode=decode,
            )
        )
        self.sampled = self._engine.collect().token_ids
        parts = [
            self._engine.read_buffer("logits", (len(sample_rows), size), np.float32, rank)
            for rank, size in enumerate(self._vocab)
        ]
        return np.concatenate(parts, axis=1)


def _page_updates(piece: Piece) -> list[tuple[int, int, int]]:
    """Pages are dealt out backwards, so that a page's id and its place in the sequence differ."""
    end = piece.position + len(piece.tokens)
    pages = range(-(-piece.position // PAGE_SIZE), -(-end // PAGE_SIZE))
    return [(piece.slot, index, (piece.slot + 1) * PAGES_A_SLOT - 1 - index) for index in pages]


@contextmanager
def open_session(
    directory: Path,
    kv_dtype: KvDtypeSetting = "auto",
    num_threads: int = 1,
    kernels: Path | None = None,
    parallelism: Parallelism = ONE_RANK,
    *,
    exchanges: Exchanges = REPLICATED,
    table: str = TABLE,
) -> Iterator[Session]:
    """An engine on the file `kernels`, by default that of `table`."""
    model = build_model(directory, kv_dtype, parallelism, exchanges=exchanges)
    options = EngineOptions(
        kernels_path=kernels or kernel_table_path(table),
        ranks=rank_options(model, first_gpu=None if table == "cpu" else 0),
        tensors=model.tensors,
        max_rows=MAX_CONTEXT,
        max_samples=SLOTS,
        max_slots=SLOTS,
        max_context=MAX_CONTEXT,
        num_pages=SLOTS * PAGES_A_SLOT,
        num_threads=num_threads,
    )
    with Engine.create(options) as engine:
        shards = [rank.layout.vocab(model.config) for rank in model.ranks]
        yield Session(engine, [end - first for first, end in shards])


def generate(session: Session, prompt: Tokens, count: int, sampling: Sampling) -> tuple[list[int], list[Logits]]:
    """The tokens that the engine samples after `prompt`, and the logits of each."""
    session.start(0, sampling)
    logits = [session.step(Piece(0, prompt, 0))[0]]
    tokens = [int(session.sampled[0])]
    while len(tokens) < count:
        at = len(prompt) + len(tokens) - 1
        logits.append(session.step(Piece(0, np.array([-1], np.int32), at), decode=True)[0])
        tokens.append(int(session.sampled[0]))
    return tokens, logits


def relative_error(found: Logits, expected: Logits) -> NDArray[np.float32]:
    """|found - expected| / |expected| of each row, in 2-norms."""
    error: NDArray[np.float32] = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return error
