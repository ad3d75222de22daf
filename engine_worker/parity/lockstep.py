"""Runs the same steps on two engines, op by op.

After each op the second engine's results become the first one's: every op is compared on equal inputs, and what
differs is that op's own doing. Keys and values in the pages stay each engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine_worker.errors import WorkerError
from engine_worker.models import Model
from engine_worker.parity.outputs import Difference, compare, read, read_buffer, written
from engine_worker.plan.record import Buffer, Op, Plan
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.records import Int32Array, Sampling, StepBatch, StepResult

# Relative errors that rounding explains: of sums in another order, stored in the dtype; FP8 codes flip at their edges.
TOLERANCE = {"f32": 2e-4, "bf16": 1e-2, "fp8": 4e-2, "i32": 0.0}
# Where what is quantised was bf16 before: gate, up and their product may each round to the other neighbour (2^-7); if
# that is the row's largest value, the scale moves and with it all codes of the row.
BF16_TOLERANCE = {**TOLERANCE, "scale": 2.5e-2, "fp8": 8e-2}


class ParityError(WorkerError):
    """The first op whose results differ by more than rounding explains."""


@dataclass(frozen=True, slots=True)
class OpError:
    """An op of a step, and the error of one of its outputs."""

    step: int
    label: str
    kind: str
    difference: Difference


class Lockstep:
    """Both engines were made with the same options but for the table."""

    def __init__(self, model: Model, reference: Engine, tested: Engine) -> None:
        self._model = model
        self._reference = reference
        self._tested = tested
        self._step = 0

    def run(self, batch: StepBatch) -> Iterator[OpError]:
        """One step; yields each output's error. Raises ParityError at the first that is too large."""
        plan = self._model.decode if batch.decode else self._model.mixed
        rows, samples = len(batch.token_ids), len(batch.sample_rows)
        for place, op in enumerate(plan.ops):
            results = [engine.run_ops(batch, [place]) for engine in (self._reference, self._tested)]
            theirs, ours = (read(engine, op, rows, samples) for engine in (self._reference, self._tested))
            for difference in compare(op, ours, theirs, self._rows_written(op, rows, samples)):
                found = OpError(self._step, op.label, op.kind, difference)
                self._check(plan, op, found)
                yield found
            if op.kind == "sample":
                self._check_tokens(op, results[0], results[1])
            for key, buffer in written(op).items():
                self._tested.write_buffer(buffer.name, theirs[key])
        self._step += 1

    def _rows_written(self, op: Op, rows: int, samples: int) -> dict[str, list[int]]:
        """Of outputs with a row for each assignment to an expert, only those of this rank's experts are written."""
        offsets, order = op.args.get("offsets"), op.args.get("order")
        if not isinstance(offsets, Buffer) or not isinstance(order, Buffer):
            return {}
        count = int(read_buffer(self._reference, offsets, rows, samples)[-1, 0])
        if op.kind == "moe_group":
            return {"order": list(range(count))}
        listed = sorted(read_buffer(self._reference, order, rows, samples)[:count, 0].tolist())
        return dict.fromkeys(("out", "q", "scale"), listed) if op.kind == "moe_gate_up" else {}

    def _check(self, plan: Plan, op: Op, found: OpError) -> None:
        difference = found.difference
        dtype = written(op)[difference.key].dtype
        tolerance = BF16_TOLERANCE if plan.act == "bf16" else TOLERANCE
        allowed = tolerance.get(difference.key, tolerance[dtype])
        if op.kind == "paged_attention":  # each engine reads the keys and values that it stored itself
            allowed = max(allowed, TOLERANCE[plan.kv.dtype])
        if difference.error <= allowed:
            return
        raise ParityError(
            f"step {found.step}, {plan.name} plan, op {op.kind} {op.label}: {difference.key}={difference.buffer} of "
            f"{dtype}, row {difference.row}: relative error {difference.error:.2g}, expected at most {allowed:g}"
        )

    def _check_tokens(self, op: Op, theirs: StepResult, ours: StepResult) -> None:
        for sample, (a, b) in enumerate(zip(theirs.token_ids.tolist(), ours.token_ids.tolist(), strict=True)):
            if a != b:
                raise ParityError(
                    f"step {self._step}, op {op.kind} {op.label}: sample {sample}: token {b}, expected {a}"
                )


def sequence_steps(prompts: Sequence[Int32Array], decodes: int) -> Iterator[StepBatch]:
    """All prompts in one step, then steps of the decode plan; slot i is prompt i's, with pages in order."""
    lengths = [len(prompt) for prompt in prompts]
    pages = -(-(max(lengths) + decodes) // PAGE_SIZE)
    slots = np.arange(len(prompts), dtype=np.int32)
    updates = [(slot, index, slot * pages + index) for slot in range(len(prompts)) for index in range(pages)]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    yield StepBatch(
        token_ids=np.concatenate(prompts).astype(np.int32),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        seq_slots=slots,
        seq_starts=starts,
        sample_rows=starts[1:] - 1,
        page_updates=np.array(updates, np.int32),
    )
    for step in range(decodes):
        yield StepBatch(
            token_ids=np.full(len(prompts), -1, np.int32),
            positions=np.array(lengths, np.int32) + step,
            seq_slots=slots,
            seq_starts=np.arange(len(prompts) + 1, dtype=np.int32),
            sample_rows=slots,
            decode=True,
        )


def bind_greedy_and_seeded(engine: Engine, slots: int) -> None:
    """Every other slot samples with a seed."""
    nothing = np.empty(0, np.int32)
    for slot in range(slots):
        seeded = Sampling(seed=slot, temperature=1.0, top_p=0.95)
        engine.bind_slot(slot, seeded if slot % 2 else Sampling(), nothing, nothing)
