"""Packs a StepPlan into the int32 arrays of a StepBatch, in buffers made once."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from engine_worker.runtime.records import Int32Array, MaskArray, Sampling, StepBatch, StepResult
from engine_worker.scheduler.request import Request, StepPlan

_NEWEST = -1  # token id of a row: the slot's newest sampled token
_EMPTY: Int32Array = np.empty(0, np.int32)


class StepEngine(Protocol):
    """What the loop needs of `runtime.abi.Engine`, which states the contract."""

    def bind_slot(self, slot: int, sampling: Sampling, prompt: Int32Array, sampled: Int32Array) -> None: ...

    def release_slot(self, slot: int) -> None: ...

    def submit(self, batch: StepBatch) -> None: ...

    def set_masks(self, masks: MaskArray) -> None: ...

    def collect(self) -> StepResult: ...


class StepPacker:
    """Reuses its buffers: a batch is valid until the next `pack` (the engine copies it in submit)."""

    def __init__(self, max_rows: int, max_seqs: int, pages_per_sequence: int) -> None:
        self._token_ids = np.empty(max_rows, np.int32)
        self._positions = np.empty(max_rows, np.int32)
        self._seq_slots = np.empty(max_seqs, np.int32)
        self._seq_starts = np.empty(max_seqs + 1, np.int32)
        self._sample_rows = np.empty(max_seqs, np.int32)
        self._sample_masks = np.empty(max_seqs, np.int32)
        self._forced_tokens = np.empty(max_seqs, np.int32)
        self._page_updates = np.empty((max_seqs * pages_per_sequence, 3), np.int32)

    def pack(self, plan: StepPlan) -> StepBatch:
        """Rows in the order of the plan's chunks."""
        token_ids: list[int] = []
        positions: list[int] = []
        starts = [0]
        sample_rows: list[int] = []
        sample_masks: list[int] = []
        forced: list[int] = []
        num_masks = 0
        for chunk in plan.chunks:
            request, start, rows, samples, scores = chunk
            first = len(positions)
            known = request.tokens[start : start + rows]
            token_ids.extend(known or (_NEWEST,))
            positions.extend(range(start, start + rows))
            starts.append(len(positions))
            if scores:
                sample_rows.extend(first + row for row in chunk.scored_rows)
                forced.extend(request.tokens[start + row + 1] for row in chunk.scored_rows)
                sample_masks.extend((-1,) * scores)
            if samples:
                forced.append(-1)
                sample_rows.append(len(positions) - 1)
                sample_masks.append(-1 if request.constraint is None else num_masks)
                num_masks += request.constraint is not None
        return StepBatch(
            token_ids=_fill(self._token_ids, token_ids),
            positions=_fill(self._positions, positions),
            seq_slots=_fill(self._seq_slots, [chunk.request.slot for chunk in plan.chunks]),
            seq_starts=_fill(self._seq_starts, starts),
            sample_rows=_fill(self._sample_rows, sample_rows),
            page_updates=self._fill_updates(plan),
            decode=plan.decode,
            forced_tokens=_fill(self._forced_tokens, forced) if any(token >= 0 for token in forced) else None,
            sample_masks=_fill(self._sample_masks, sample_masks) if num_masks else None,
            num_masks=num_masks,
        )

    def _fill_updates(self, plan: StepPlan) -> Int32Array:
        view = self._page_updates[: len(plan.page_updates)]
        if len(view):
            view[:] = np.array(plan.page_updates, np.int32)
        return view


def submit_step(engine: StepEngine, packer: StepPacker, plan: StepPlan) -> None:
    """Tell `engine` all that the plan says, in the order in which it must hear it."""
    for slot in plan.released_slots:
        engine.release_slot(slot)
    for request in plan.bound:
        engine.bind_slot(request.slot, _sampling(request), *_history(request))
    engine.submit(packer.pack(plan))


def _sampling(request: Request) -> Sampling:
    """The slot computes as many log-probabilities as the prompt or its continuation need."""
    sampling = request.sampling
    if request.num_prompt_logprobs <= sampling.num_logprobs:
        return sampling
    return dataclasses.replace(sampling, num_logprobs=request.num_prompt_logprobs)


def _history(request: Request) -> tuple[Int32Array, Int32Array]:
    """Prompt and sampled tokens for the sampler's penalties; empty where none is on."""
    sampling = request.sampling
    if sampling.repetition_penalty == 1.0 and not sampling.frequency_penalty and not sampling.presence_penalty:
        return _EMPTY, _EMPTY
    tokens = np.array(request.tokens, np.int32)
    return tokens[: request.prompt_len], tokens[request.prompt_len :]


def _fill(buffer: Int32Array, values: list[int]) -> Int32Array:
    view = buffer[: len(values)]
    view[:] = values
    return view
