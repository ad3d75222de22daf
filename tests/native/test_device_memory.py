"""The runtime on a device whose memory the host cannot touch and whose stream runs late (device_table.cpp).

The logits of every golden checkpoint are, bit for bit, those of the same kernels in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from engine_worker.errors import CheckpointError, DeviceError, OutOfMemoryError
from engine_worker.models import build_model
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, Sampling
from tests.golden.cases import CASES, Case
from tests.golden.session import Piece, Session, Tokens, open_session
from tests.native.device_table import DeviceTable
from tests.native.tiny import NO_TOKENS, batch, bind, ints, step

BY_NAME = {case.name: case for case in CASES}
CONTEXT, SLOTS, PAGES = 64, 20, 80


@pytest.fixture(scope="session")
def loaded_device() -> DeviceTable:
    return DeviceTable()


@pytest.fixture
def device(loaded_device: DeviceTable) -> Iterator[DeviceTable]:
    loaded_device.reset()
    yield loaded_device
    loaded_device.reset()


def tokens_of(case: Case) -> Tokens:
    tokens: Tokens = np.load(case.directory / "expected.npz")["token_ids"]
    return tokens


def options(device: DeviceTable, case: Case = BY_NAME["f32_glm47"]) -> EngineOptions:
    model = build_model(case.directory, "auto")
    return EngineOptions(
        kernels_path=device.path,
        ranks=rank_options(model),
        tensors=model.tensors,
        max_rows=CONTEXT,
        max_samples=SLOTS,
        max_slots=SLOTS,
        max_context=CONTEXT,
        num_pages=PAGES,
        num_threads=2,
    )


@pytest.fixture
def engine(device: DeviceTable) -> Iterator[Engine]:
    with Engine.create(options(device)) as made:
        yield made


# ---- the same numbers ----


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_those_in_host_memory(device: DeviceTable, case: Case) -> None:
    tokens = tokens_of(case)

    def logits(session: Session) -> list[np.ndarray]:
        found = [session.decode(tokens), session.prefill(tokens), session.prefill(tokens, [17, 15, 17])]
        other = tokens[::-1].copy()
        for slot in (0, 1):
            session.start(slot)
        for i in range(4):  # a decode in the company of another prompt's chunks
            found.append(session.step(Piece(0, tokens[i : i + 1], i), Piece(1, other[3 * i : 3 * i + 3], 3 * i)))
        found.append(session.step(Piece(0, tokens[4:5], 4), Piece(1, other[12:13], 12), decode=True))
        return found

    with open_session(case.directory, kernels=kernel_table_path("cpu")) as session:
        expected = logits(session)
    with open_session(case.directory, kernels=device.path) as session:
        launches = device.graph_launches
        found = logits(session)
    assert device.graph_launches - launches == len(tokens) + 1
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_profiler_sees_each_op_by_its_label(engine: Engine, device: DeviceTable) -> None:
    bind(engine, 0)
    enqueued, ranges = device.ops_enqueued, device.ranges
    step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)]))
    assert device.ops_enqueued > enqueued
    assert device.ranges - ranges == device.ops_enqueued - enqueued
    assert device.last_range == "head.sample"


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 9, 16, 17, SLOTS])
def test_every_bucket_gives_each_row_its_own_numbers(engine: Engine, device: DeviceTable, num_rows: int) -> None:
    """Each slot echoes its own codeword, padding notwithstanding; then once more on the tokens just sampled."""
    vocab = engine.info().vocab
    slots = list(range(num_rows))[::-1]
    for slot in slots:  # the codeword is so likely that nothing else is sampled
        bind(engine, slot, sampling=Sampling(logit_bias=[(slot + 7, 1e4)], num_logprobs=0))
    updates = [(slot, 0, PAGES - 1 - slot) for slot in slots]
    first = step(engine, batch(*[(slot, 0, [slot]) for slot in slots], updates=updates, decode=True))
    assert first.token_ids.tolist() == [slot + 7 for slot in slots]
    launches, enqueued = device.graph_launches, device.ops_enqueued
    second = step(engine, batch(*[(slot, 1, [-1]) for slot in slots], decode=True))
    assert second.token_ids.tolist() == [slot + 7 for slot in slots]
    assert (device.graph_launches, device.ops_enqueued) == (launches + 1, enqueued + 1)  # sample is no part of it
    together = engine.read_buffer("logits", (num_rows, vocab), np.float32)
    for slot in slots:
        engine.release_slot(slot)
    for row, slot in enumerate(slots):
        bind(engine, 0, sampling=Sampling(logit_bias=[(slot + 7, 1e4)]))
        step(engine, batch((0, 0, [slot]), updates=[(0, 0, 3)], decode=True))
        alone = step(engine, batch((0, 1, [-1]), decode=True))
        assert alone.token_ids.tolist() == [slot + 7]
        np.testing.assert_array_equal(engine.read_buffer("logits", (1, vocab), np.float32)[0], together[row])
        engine.release_slot(0)


def test_seeded_sampling_with_penalties_is_the_same(device: DeviceTable) -> None:
    sampling = Sampling(seed=5, temperature=1.0, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
    chosen = []
    for path in (kernel_table_path("cpu"), device.path):
        with Engine.create(replace(options(device), kernels_path=path)) as engine:
            engine.bind_slot(2, replace(sampling, prompt_len=3), ints(4, 5, 6), ints())
            tokens = step(engine, batch((2, 0, [4, 5, 6]), updates=[(2, 0, 1), (2, 1, 2)])).token_ids.tolist()
            for position in range(3, 20):
                tokens += step(engine, batch((2, position, [-1]), decode=True)).token_ids.tolist()
        chosen.append(tokens)
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 3


# ---- the stream ----


def test_nothing_waits_for_the_device_before_collect(engine: Engine, device: DeviceTable) -> None:
    bind(engine, 0)
    step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)], decode=True))
    run, slow = device.ops_run, device.slow_copies
    copies = device.copies_in
    engine.submit(batch((0, 1, [-1]), decode=True))
    bind(engine, 1)
    engine.submit(batch((0, 2, [-1]), (1, 0, [5]), updates=[(1, 0, 4)], decode=True))
    first = engine.collect()
    after_first = device.ops_run
    second = engine.collect()
    after_second = device.ops_run
    assert first.token_ids.shape == (1,)
    assert second.token_ids.shape == (2,)
    ops = len(build_model(BY_NAME["f32_glm47"].directory, "auto").decode.ops)
    assert (after_first - run, after_second - after_first) == (ops, ops)
    # One copy a step and one a binding, all from memory that the device reaches directly.
    assert (device.copies_in - copies, device.slow_copies - slow) == (3, 0)


def test_more_bindings_than_places_between_steps(engine: Engine) -> None:
    for slot in range(SLOTS):
        engine.bind_slot(slot, Sampling(repetition_penalty=2.0, num_logprobs=0), ints(slot), ints(slot, slot))
    sequences = [(slot, 0, [slot]) for slot in range(SLOTS)]
    updates = [(slot, 0, slot) for slot in range(SLOTS)]
    result = step(engine, batch(*sequences, updates=updates, decode=True))
    assert np.isfinite(result.logprobs).all()


def test_fault_of_the_device_is_told_by_collect(engine: Engine, device: DeviceTable) -> None:
    bind(engine, 0)
    device.fail(3)
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    for call in (engine.collect, engine.collect, engine.info):
        with pytest.raises(DeviceError, match="kernel table late: event_wait failed: told to fail in step 0"):
            call()


def test_destroy_with_steps_in_flight(device: DeviceTable) -> None:
    engine = Engine.create(options(device))
    bind(engine, 0)
    run = device.ops_run
    engine.submit(batch((0, 0, [1]), updates=[(0, 0, 0)]))
    engine.submit(batch((0, 1, [-1]), decode=True))
    engine.close()
    assert device.ops_run > run


# ---- memory ----


def test_memory_is_told_and_bounded(device: DeviceTable) -> None:
    with Engine.create(options(device)) as engine:
        info = engine.info()
    assert info.weight_bytes_mapped == 0
    device.limit(1000)
    with pytest.raises(OutOfMemoryError, match=r"bytes for weights, but 1000 are free: \d+ are missing"):
        Engine.create(options(device))
    device.limit(info.weight_bytes_copied + info.scratch_bytes + info.kv_bytes // 2)
    with pytest.raises(OutOfMemoryError, match=r"bytes for KV pages, but \d+ are free: \d+ are missing"):
        Engine.create(replace(options(device), num_pages=100 * PAGES))


def test_too_little_memory_for_fitting_pages(device: DeviceTable) -> None:
    with pytest.raises(OutOfMemoryError, match="KV pages, at least one, and the driver, but"):
        Engine.create(replace(options(device), fit_pages=True))


def test_weights_are_scanned_on_their_way(device: DeviceTable, tmp_path_factory: pytest.TempPathFactory) -> None:
    case = BY_NAME["fp8_channel_f32"]
    chosen = options(device, case)
    source = next(source for source in chosen.tensors if source.dtype == "F8_E4M3" and "experts" in source.name)
    broken = tmp_path_factory.mktemp("broken") / "shard"
    assert source.path is not None
    content = bytearray(source.path.read_bytes())
    content[source.offset + 5] = 0x7F
    broken.write_bytes(content)
    tensors = [replace(other, path=broken) if other.path == source.path else other for other in chosen.tensors]
    with pytest.raises(CheckpointError, match=rf"tensor {source.name} in .*: NaN at index 5, expected finite"):
        Engine.create(replace(chosen, tensors=tensors))


def test_progress_reaches_the_total(device: DeviceTable) -> None:
    reports: list[tuple[int, int]] = []
    chosen = replace(options(device), progress=lambda done, total: reports.append((done, total)))
    Engine.create(chosen).close()
    assert reports[-1][0] == reports[-1][1] > 0
    assert all(before[0] <= after[0] for before, after in pairwise(reports))


def test_history_is_optional(engine: Engine) -> None:
    engine.bind_slot(0, Sampling(), NO_TOKENS, NO_TOKENS)
    assert step(engine, batch((0, 0, [1]), updates=[(0, 0, 0)])).token_ids.shape == (1,)
