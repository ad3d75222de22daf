"""The engine on a kernel table that fails on demand: counts at their bounds, arguments, order, failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_worker.errors import (
    DeviceError,
    InternalError,
    InvalidRequestError,
    OutOfMemoryError,
    UnsupportedError,
    WorkerError,
)
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.c_types import MAX_IN_FLIGHT
from engine_worker.runtime.records import Sampling, StepBatch, TensorSource
from tests.native import tiny
from tests.native.fault_table import FaultTable, Op
from tests.native.tiny import MAX_CONTEXT, MAX_ROWS, MAX_SAMPLES, MAX_SLOTS, NUM_PAGES, batch, bind, ints, step

GLM_INVALID_ARGUMENT, GLM_UNSUPPORTED, GLM_DEVICE_ERROR, GLM_INTERNAL = 1, 2, 5, 6


# ---- creation ----


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(
            (name, 0, f"{name} 0, expected at least 1")
            for name in ("max_rows", "max_samples", "max_slots", "num_pages")
        ),
        ("max_context", 0, "max_context 0, expected at least 1"),
        ("max_context", 17, "max_context 17, expected a multiple of 16"),
        ("num_threads", -1, "num_threads -1, expected at least 0"),
    ],
)
def test_limits_are_checked(
    faults: FaultTable, tensors: list[TensorSource], field: str, value: int, message: str
) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequestError, match=message):
        Engine.create(tiny.options(faults.path, tensors, **change))


def test_smallest_engine(faults: FaultTable, tensors: list[TensorSource]) -> None:
    ones: dict[str, Any] = {"max_rows": 1, "max_samples": 1, "max_slots": 1, "max_context": 16, "num_pages": 1}
    with Engine.create(tiny.options(faults.path, tensors, **ones)) as engine:
        bind(engine, 0)
        for position in range(16):
            assert step(engine, batch((0, position, [3]), updates=[(0, 0, 0)])).token_ids.tolist() == [position + 1]
        with pytest.raises(InvalidRequestError, match=r"positions\[0\] 16, expected 0 to 15"):
            engine.submit(batch((0, 16, [3])))


@pytest.mark.parametrize(("field", "what"), [("num_pages", "KV pages of layer 0"), ("max_slots", "slots")])
def test_out_of_memory_says_what_for(faults: FaultTable, tensors: list[TensorSource], field: str, what: str) -> None:
    huge = (
        tiny.plan("mixed").replace("head_dim=16", "head_dim=1000000"),
        tiny.plan("decode").replace("head_dim=16", "head_dim=1000000"),
    )
    changes: dict[str, Any] = {field: 2**31 - 1, "max_context": 16 * 10**6}
    with pytest.raises(OutOfMemoryError) as caught:
        Engine.create(tiny.options(faults.path, tensors, mixed_plan=huge[0], decode_plan=huge[1], **changes))
    assert what in str(caught.value)
    assert "bytes for" in str(caught.value)


def test_kernel_table_problems(faults: FaultTable, tensors: list[TensorSource]) -> None:
    with pytest.raises(UnsupportedError, match=r"kernel table /gone.so cannot be loaded"):
        Engine.create(replace(tiny.options(faults.path, tensors), kernels_path=faults.path.__class__("/gone.so")))
    faults.speak(1)
    with pytest.raises(UnsupportedError, match="does not speak version 4"):
        Engine.create(tiny.options(faults.path, tensors))
    faults.reset()
    faults.fail_open(GLM_DEVICE_ERROR)
    with pytest.raises(DeviceError, match="kernel table fault: device 0: told to fail"):
        Engine.create(tiny.options(faults.path, tensors))


def test_all_missing_ops_are_listed(faults: FaultTable, tensors: list[TensorSource]) -> None:
    faults.remove_norms()
    norm = "op rms_norm n residual=x weight=v eps=1 out=x"
    mixed = tiny.plan("mixed", norm, norm)
    with pytest.raises(UnsupportedError, match=r"fault lacks .*: rms_norm \(2 calls\), quantize \(1 calls\)"):
        Engine.create(tiny.options(faults.path, tensors, mixed_plan=mixed))
    plain = tiny.plan("mixed", drop=[tiny.QUANTIZE])
    Engine.create(tiny.options(faults.path, tensors, mixed_plan=plain)).close()


def test_workspace_is_the_largest_wish(faults: FaultTable, tensors: list[TensorSource]) -> None:
    faults.want_workspace(12345)
    Engine.create(tiny.options(faults.path, tensors)).close()
    assert faults.workspace() == 12345


def test_info(engine: Engine) -> None:
    bind(engine, 0)
    step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)]))
    info = engine.info()
    assert (info.kernels, info.device) == ("fault", "test device")
    assert info.kv_bytes == 2 * 2 * NUM_PAGES * 16 * 16 * 4
    assert (info.num_pages, info.max_slots, info.max_context) == (NUM_PAGES, MAX_SLOTS, MAX_CONTEXT)
    assert (info.vocab, info.steps_run) == (tiny.VOCAB, 1)
    assert info.scratch_bytes > 0


# ---- steps ----


@pytest.mark.parametrize("num_rows", [0, 1, MAX_ROWS - 1, MAX_ROWS])
@pytest.mark.parametrize("num_samples", [0, 1])
def test_row_counts(engine: Engine, faults: FaultTable, num_rows: int, num_samples: int) -> None:
    bind(engine, 2)
    samples = list(range(num_rows))[-num_samples:] if num_samples else []
    sequences = [(2, 5, list(range(num_rows)))] if num_rows else []
    result = step(engine, batch(*sequences, samples=samples, updates=[(2, 0, 9), (2, 1, 8)]))
    assert result.token_ids.tolist() == [5 + num_rows for _ in samples]
    assert (faults.rows(Op.EMBED), faults.rows(Op.SAMPLE)) == (num_rows, len(samples))
    rows = engine.read_buffer("x", (num_rows, tiny.HIDDEN), np.float32)
    assert (rows == np.arange(num_rows)[:, None]).all()


@pytest.mark.parametrize("num_seqs", [1, MAX_SAMPLES - 1, MAX_SAMPLES])
def test_sequence_and_sample_counts(engine: Engine, num_seqs: int) -> None:
    slots = list(range(MAX_SLOTS))[-num_seqs:]  # the last slot is always among them
    bind(engine, *slots)
    sequences = [(slot, slot * 3, [1, 2]) for slot in slots]
    updates = [(slot, 0, slot) for slot in slots]
    result = step(engine, batch(*sequences, updates=updates))
    assert result.token_ids.tolist() == [slot * 3 + 2 for slot in slots]
    assert result.top_ids[:, 0].tolist() == slots


@pytest.mark.parametrize("decode", [False, True])
def test_the_caller_chooses_the_plan(engine: Engine, faults: FaultTable, decode: bool) -> None:
    bind(engine, 0, 1)
    step(engine, batch((0, 0, [1]), (1, 0, [1]), updates=[(0, 0, 0), (1, 0, 1)], decode=decode))
    step(engine, batch((0, 1, [1]), decode=decode))
    assert faults.calls(Op.QUANTIZE) == (0 if decode else 2)  # an op of the mixed plan alone


@pytest.mark.parametrize(
    "submitted",
    [
        batch((0, 0, [1]), (1, 0, [1]), samples=[0], updates=[(0, 0, 0), (1, 0, 1)], decode=True),
        batch((0, 0, [1, 2]), (1, 0, [1]), updates=[(0, 0, 0), (1, 0, 1)], decode=True),
    ],
)
def test_decode_plan_takes_one_sampled_row_a_sequence(engine: Engine, submitted: StepBatch) -> None:
    bind(engine, 0, 1)
    with pytest.raises(InvalidRequestError, match="expected one row a sequence, every row sampled"):
        engine.submit(submitted)


def test_two_steps_in_flight(engine: Engine) -> None:
    bind(engine, 0)
    engine.submit(batch((0, 0, [7]), updates=[(0, 0, 3)]))
    engine.submit(batch((0, 1, [-1])))
    with pytest.raises(InvalidRequestError, match=f"{MAX_IN_FLIGHT} steps are in flight"):
        engine.submit(batch((0, 2, [-1])))
    assert engine.collect().token_ids.tolist() == [1]
    engine.submit(batch((0, 2, [-1])))
    assert [engine.collect().token_ids.tolist() for _ in range(2)] == [[2], [3]]
    assert engine.read_buffer("x", (1, 1 * tiny.HIDDEN), np.float32)[0, 0] == 2  # what the step before had sampled
    with pytest.raises(InvalidRequestError, match="no step is in flight"):
        engine.collect()


BAD_BATCHES: list[tuple[str, StepBatch, str]] = [
    ("rows", batch((0, 0, [1] * (MAX_ROWS + 1))), f"num_rows {MAX_ROWS + 1}, expected 0 to {MAX_ROWS}"),
    ("seqs", batch(*[(s, 0, [1]) for s in range(MAX_SAMPLES + 1)]), f"num_seqs {MAX_SAMPLES + 1}, expected 0 to"),
    ("seqs without rows", batch((0, 0, [])), "num_seqs 1, expected 0 to 0"),
    ("samples", batch((0, 0, [1, 2]), samples=[0, 1]), "sample_rows[1] 1: its sequence has been sampled"),
    ("token", batch((0, 0, [1, tiny.VOCAB])), f"token_ids[1] {tiny.VOCAB}, expected -1 to {tiny.VOCAB - 1}"),
    ("token below", batch((0, 0, [-2])), "token_ids[0] -2, expected -1"),
    ("no last token", batch((0, 0, [-1])), "token_ids[0] -1, but no step has sampled a token for slot 0"),
    ("slot", batch((MAX_SLOTS, 0, [1])), f"seq_slots[0] {MAX_SLOTS}, expected 0 to {MAX_SLOTS - 1}"),
    ("negative slot", batch((-1, 0, [1])), "seq_slots[0] -1, expected 0"),
    ("free slot", batch((3, 0, [1])), "seq_slots[0]: slot 3 is not bound"),
    ("slot twice", batch((0, 0, [1]), (0, 1, [1])), "seq_slots[1]: slot 0 is in the step twice"),
    ("position", batch((0, -1, [1])), "positions[0] -1, expected 0 to 63"),
    ("position above", batch((0, 60, [1] * 5)), "positions[4] 64, expected at most 63"),
    ("no page", batch((0, 16, [1])), "positions[0] 16: slot 0 has no page for index 1"),
    ("gap in pages", batch((0, 32, [1]), updates=[(0, 2, 1)]), "positions[0] 32: slot 0 has no page for index 1"),
    ("page", batch((0, 0, [1]), updates=[(0, 0, NUM_PAGES)]), f"page_updates.page[0] {NUM_PAGES}, expected 0 to 9"),
    ("page below", batch((0, 0, [1]), updates=[(0, 0, -1)]), "page_updates.page[0] -1, expected 0 to 9"),
    ("page index", batch((0, 0, [1]), updates=[(0, 0, 0), (0, 4, 0)]), "page_updates.index[1] 4, expected 0 to 3"),
    ("page slot", batch((0, 0, [1]), updates=[(4, 0, 0)]), "page_updates.slot[0] 4, expected 0 to 3"),
    ("page of a free slot", batch((0, 0, [1]), updates=[(3, 0, 0)]), "page_updates[0]: slot 3 is not bound"),
    ("sample row", batch((0, 0, [1]), samples=[1]), "sample_rows[0] 1, expected 0 to 0"),
    ("negative sample row", batch((0, 0, [1]), samples=[-1]), "sample_rows[0] -1, expected 0 to 0"),
    ("samples of one", batch((0, 0, [1, 1]), (1, 0, [1]), samples=[0, 1]), "sample_rows[1] 1: its sequence has"),
    ("samples order", batch((0, 0, [1]), (1, 0, [1]), samples=[1, 0]), "sample_rows[1] 0, expected 2 to 1"),
    ("first start", replace(batch((0, 0, [1])), seq_starts=ints(1, 1)), "seq_starts[0] 1, expected 0"),
    ("last start", replace(batch((0, 0, [1, 2])), seq_starts=ints(0, 1)), "seq_starts[1] 1, expected num_rows 2"),
    ("start above", replace(batch((0, 0, [1])), seq_starts=ints(0, 9)), "seq_starts[1] 9, expected 1 to 1"),
    (
        "empty sequence",
        replace(batch((0, 0, [1]), (1, 0, [1])), seq_starts=ints(0, 0, 2)),
        "seq_starts[1] 0, expected 1 to 2",
    ),
    (
        "jump",
        replace(batch((0, 0, [1, 1])), positions=ints(0, 2)),
        "positions[1] 2, expected 1: a sequence's positions are consecutive",
    ),
    (
        "rows of no sequence",
        replace(batch((0, 0, [1])), seq_slots=ints(), seq_starts=ints(0)),
        "seq_starts[0] 0, expected num_rows 1",
    ),
]


@pytest.mark.parametrize(("submitted", "message"), [b[1:] for b in BAD_BATCHES], ids=[b[0] for b in BAD_BATCHES])
def test_bad_batch_leaves_the_engine_as_it_was(
    engine: Engine, faults: FaultTable, submitted: StepBatch, message: str
) -> None:
    bind(engine, 0, 1, 2)
    step(engine, batch((0, 0, [1]), (1, 0, [1]), samples=[], updates=[(0, 0, 5), (1, 0, 6)]))
    calls = faults.calls(Op.EMBED)
    with pytest.raises(InvalidRequestError) as caught:
        engine.submit(submitted)
    assert message in str(caught.value)
    assert faults.calls(Op.EMBED) == calls
    result = step(engine, batch((0, 15, [1]), (1, 15, [1])))
    assert result.top_ids[:, 0].tolist() == [5, 6]
    with pytest.raises(InvalidRequestError, match="slot 0 has no page for index 1"):
        engine.submit(batch((0, 16, [1])))


def test_the_last_update_of_an_entry_counts(engine: Engine) -> None:
    bind(engine, 0)
    assert step(engine, batch((0, 0, [1]), updates=[(0, 0, 4), (0, 0, 7)])).top_ids[0, 0] == 7


def test_pages_change_from_their_step_on(engine: Engine) -> None:
    bind(engine, 0)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 4)]))
    engine.submit(batch((0, 1, [1]), updates=[(0, 1, 6), (0, 0, 5)]))
    assert [engine.collect().top_ids[0, :2].tolist() for _ in range(2)] == [[4, -1], [5, 6]]


# ---- slots ----


def test_release_forgets_pages_and_bind_starts_anew(engine: Engine) -> None:
    bind(engine, 0)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 4)]))
    engine.release_slot(0)
    engine.release_slot(0)
    bind(engine, 0, sampling=Sampling(temperature=0.5))
    with pytest.raises(InvalidRequestError, match="has no page for index 0"):
        engine.submit(batch((0, 0, [1])))
    with pytest.raises(InvalidRequestError, match="no step has sampled"):
        engine.submit(batch((0, 0, [-1]), updates=[(0, 0, 5)]))
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 5)]))
    first, second = engine.collect(), engine.collect()
    assert (first.top_ids[0, 0], first.top_logprobs[0, 0]) == (4, 0)
    assert (second.top_ids[0, 0], second.top_logprobs[0, 0]) == (5, 0.5)


@pytest.mark.parametrize(
    ("prompt", "sampled", "expected"),
    [([], [], 0), ([7, 7, 3], [], 0x8000), ([], [7, 3, 7], 2), ([7], [7], 0x8001), ([7], [7] * 40000, 0xFFFF)],
)
def test_history_becomes_counts(engine: Engine, prompt: list[int], sampled: list[int], expected: int) -> None:
    for _ in range(2):  # the second owner of the slot sees nothing of the first
        engine.bind_slot(1, Sampling(num_logprobs=0), ints(*prompt), ints(*sampled))
        result = step(engine, batch((1, 0, [1]), updates=[(1, 0, 0)]))
        assert result.logprobs[0] == expected
        engine.release_slot(1)


BAD_SAMPLING = [
    ({"temperature": -0.1}, "temperature -0.1, expected 0 to"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"temperature": float("inf")}, "temperature inf"),
    ({"top_p": 0.0}, "top_p 0, expected above 0 to 1"),
    ({"top_p": 1.5}, "top_p 1.5"),
    ({"min_p": 1.5}, "min_p 1.5, expected 0 to 1"),
    ({"repetition_penalty": 0.0}, "repetition_penalty 0, expected above 0"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty nan"),
    ({"presence_penalty": float("inf")}, "presence_penalty inf"),
    ({"top_k": -1}, "top_k -1, expected 0"),
    ({"min_tokens": -1}, "min_tokens -1"),
    ({"prompt_len": MAX_CONTEXT + 1}, "prompt_len 65, expected 0 to 64"),
    ({"num_logprobs": 21}, "num_logprobs 21, expected -1 to 20"),
    ({"num_logprobs": -2}, "num_logprobs -2"),
    ({"stop_ids": [1, tiny.VOCAB]}, "stop_ids[1] 100, expected 0 to 99"),
    ({"stop_ids": [0] * 65}, "stop_ids: 65 entries, at most 64 are allowed"),
    ({"logit_bias": [(-1, 0.0)]}, "bias_ids[0] -1, expected 0 to 99"),
    ({"logit_bias": [(1, float("nan"))]}, "bias_values nan"),
    ({"logit_bias": [(1, 0.0)] * 301}, "logit_bias: 301 entries, at most 300 are allowed"),
]


@pytest.mark.parametrize(("values", "message"), BAD_SAMPLING)
def test_bad_sampling_is_refused(engine: Engine, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        bind(engine, 0, sampling=Sampling(**values))
    assert message in str(caught.value)
    bind(engine, 0)  # the slot is still free


def test_bound_and_unknown_slots(engine: Engine) -> None:
    bind(engine, 0, MAX_SLOTS - 1)
    with pytest.raises(InvalidRequestError, match="slot 0 is bound: release it first"):
        bind(engine, 0)
    for slot in (-1, MAX_SLOTS):
        with pytest.raises(InvalidRequestError, match=f"slot {slot}, expected 0 to 3"):
            bind(engine, slot)
        with pytest.raises(InvalidRequestError, match=f"slot {slot}, expected 0 to 3"):
            engine.release_slot(slot)
    with pytest.raises(InvalidRequestError, match=r"prompt\[1\] 100, expected 0 to 99"):
        engine.bind_slot(1, Sampling(), ints(0, 100), ints())
    with pytest.raises(InvalidRequestError, match=r"sampled\[0\] -1, expected 0 to 99"):
        engine.bind_slot(1, Sampling(), ints(), ints(-1))


# ---- failure ----


@pytest.mark.parametrize(
    ("status", "error", "name"),
    [
        (GLM_DEVICE_ERROR, DeviceError, "GLM_DEVICE_ERROR"),
        (GLM_INTERNAL, InternalError, "GLM_INTERNAL"),
        (GLM_INVALID_ARGUMENT, InternalError, "GLM_INVALID_ARGUMENT"),
    ],
)
def test_failed_op_fails_the_engine(
    engine: Engine, faults: FaultTable, status: int, error: type[WorkerError], name: str
) -> None:
    bind(engine, 0)
    faults.fail(Op.SAMPLE, status, after_calls=1)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    engine.submit(batch((0, 1, [1])))
    assert engine.collect().token_ids.tolist() == [1]
    message = f"op sample sample of kernel table fault returned {name} in step 1"
    later: list[Callable[[], object]] = [
        engine.collect,
        engine.collect,
        engine.info,
        lambda: engine.submit(batch((0, 2, [1]))),
        lambda: bind(engine, 1),
        lambda: engine.release_slot(0),
        lambda: engine.read_buffer("x", (1, tiny.HIDDEN), np.float32),
    ]
    for call in later:
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == message
    assert faults.calls(Op.SAMPLE) == 2


def test_steps_behind_a_failed_one_do_not_run(engine: Engine, faults: FaultTable) -> None:
    bind(engine, 0)
    faults.fail(Op.EMBED, GLM_DEVICE_ERROR)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    with contextlib.suppress(DeviceError):  # the first one may have failed already
        engine.submit(batch((0, 1, [1])))
    with pytest.raises(DeviceError, match="op embed embed"):
        engine.collect()
    engine.close()
    assert (faults.calls(Op.EMBED), faults.calls(Op.SAMPLE)) == (1, 0)


# ---- buffers ----


def test_read_buffer_is_checked(engine: Engine) -> None:
    bind(engine, 0)
    engine.submit(batch((0, 0, [3]), updates=[(0, 0, 0)]))
    with pytest.raises(InvalidRequestError, match="the engine is not idle"):
        engine.read_buffer("x", (1, tiny.HIDDEN), np.float32)
    engine.collect()
    with pytest.raises(InvalidRequestError, match="no buffer is named 'y'"):
        engine.read_buffer("y", (1, 1), np.float32)
    with pytest.raises(InvalidRequestError, match=f"rows {MAX_ROWS + 1}, expected 0 to {MAX_ROWS}"):
        engine.read_buffer("x", (MAX_ROWS + 1, tiny.HIDDEN), np.float32)
    with pytest.raises(InvalidRequestError, match="28 bytes, expected 32: 1 rows of 8 f32"):
        engine.read_buffer("x", (1, tiny.HIDDEN - 1), np.float32)
    assert engine.read_buffer("x", (0, tiny.HIDDEN), np.float32).shape == (0, tiny.HIDDEN)
    assert (engine.read_buffer("x", (1, tiny.HIDDEN), np.float32) == 3).all()
