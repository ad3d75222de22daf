from typing import Any

import numpy as np
import pytest

from tests.kernels.cases_attention import CASES, EDGES, AttentionCase, AttentionProblem
from tests.kernels.harness import BF16, FP8, Chunk, Device, assert_bits_equal, assert_close


def tolerance(case: AttentionCase) -> float:
    return 2**-7 if case.act == BF16 else 2e-5


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64(device: Device, rng: np.random.Generator, case: AttentionCase) -> None:
    problem = AttentionProblem(case, rng)
    chunks = problem.chunks()
    for chunk, actual in zip(chunks, problem.run(device, chunks), strict=True):
        assert_close(actual, problem.expected(chunk), tolerance(case))


@pytest.mark.parametrize("heads", [96, 12])
def test_twelve_query_heads_share_one_kv_head(device: Device, rng: np.random.Generator, heads: int) -> None:
    case = AttentionCase(heads, heads // 12, 128, [(70, 1), (0, 9)])
    problem = AttentionProblem(case, rng)
    for chunk, actual in zip(problem.chunks(), problem.run(device, problem.chunks()), strict=True):
        assert_close(actual, problem.expected(chunk), 2e-5)


def split(length: int, sizes: list[int]) -> list[Chunk]:
    """Slot 0 cut into chunks of these sizes in turn."""
    chunks: list[Chunk] = []
    start = 0
    while start < length:
        size = min(sizes[len(chunks) % len(sizes)], length - start)
        chunks.append(Chunk(0, start, size))
        start += size
    return chunks


@pytest.mark.parametrize("length", [*range(1, 50), 513, 1040])
def test_any_chunking_gives_the_bits_of_decoding_token_by_token(
    device: Device, rng: np.random.Generator, length: int
) -> None:
    problem = AttentionProblem(AttentionCase(3, 1, 64, [(0, length)]), rng)
    whole = problem.run(device, [Chunk(0, 0, length)])[0]
    for sizes in ([1], [7], [16], [5, 33], [512]):
        parts = [problem.run(device, [chunk])[0] for chunk in split(length, sizes)]
        assert_bits_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("heads,kv_heads,head_dim", [(1, 1, 64), (4, 4, 24), (12, 1, 128), (16, 1, 64), (8, 1, 72)])
def test_chunking_keeps_bits_for_every_ratio(
    device: Device, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    problem = AttentionProblem(AttentionCase(heads, kv_heads, head_dim, [(0, 70)]), rng)
    whole = problem.run(device, [Chunk(0, 0, 70)])[0]
    for sizes in ([1], [3, 20]):
        assert_bits_equal(np.concatenate([problem.run(device, [c])[0] for c in split(70, sizes)]), whole)


@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(12, 1, 128), (16, 2, 64)])
def test_bf16_rows_keep_their_bits_in_any_chunking(
    device: Device, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int, kv: "np.dtype[Any]"
) -> None:
    problem = AttentionProblem(AttentionCase(heads, kv_heads, head_dim, [(0, 530)], kv, BF16), rng)
    whole = problem.run(device, [Chunk(0, 0, 530)])[0]
    for sizes in ([100, 37], [265]):
        parts = [problem.run(device, [chunk])[0] for chunk in split(530, sizes)]
        assert_bits_equal(np.concatenate(parts), whole)
    for row in (0, 63, 64, 255, 256, 511, 512, 529):
        assert_bits_equal(problem.run(device, [Chunk(0, row, 1)])[0], whole[row : row + 1])


def test_a_row_has_the_same_bits_alone_and_in_a_crowd(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    spans = [(length - 1, 1) for length in EDGES] + [(2500, 1), (30, 20), (600, 5)]
    problem = AttentionProblem(AttentionCase(9, 3, 64, spans), rng)
    chunks = problem.chunks()
    crowd = problem.run(device, chunks)
    reordered = problem.run(other_device, chunks[::-1])[::-1]
    for chunk, together, elsewhere in zip(chunks, crowd, reordered, strict=True):
        alone = problem.run(device, [chunk])[0]
        assert_bits_equal(together, alone)
        assert_bits_equal(elsewhere, alone)


@pytest.mark.parametrize("longest", [4096, 4700])
@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(12, 1, 128), (8, 2, 64)])
def test_rows_of_large_batches_have_the_bits_they_have_alone(
    device: Device,
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kv: "np.dtype[Any]",
    longest: int,
) -> None:
    lengths = [*EDGES, 63, 64, 65, 384, 448, 449, 2048, 2049, 3000, longest - 1, longest]
    spans = [(length - 1, 1) for length in lengths]
    problem = AttentionProblem(AttentionCase(heads, kv_heads, head_dim, spans, kv, BF16), rng)
    alone = [problem.run(device, [chunk])[0] for chunk in problem.chunks()]
    for rows in (2, 7, 16, 33, 70, 130, 200, 270):
        slots = rng.integers(0, len(lengths), rows)
        crowd = problem.run(device, [problem.chunks()[slot] for slot in slots])
        for slot, row in zip(slots, crowd, strict=True):
            assert_bits_equal(row, alone[slot])


@pytest.mark.parametrize("kv", [BF16, FP8], ids=str)
def test_long_rows_have_the_bits_they_have_alone(device: Device, rng: np.random.Generator, kv: "np.dtype[Any]") -> None:
    """Splits of more than 512 keys."""
    spans = [(length - 1, 1) for length in (16385, 17000, 33000)]
    problem = AttentionProblem(AttentionCase(12, 1, 128, spans, kv, BF16), rng)
    chunks = problem.chunks()
    alone = [problem.run(device, [chunk])[0] for chunk in chunks]
    for row, again in zip(problem.run(device, chunks * 7), alone * 7, strict=True):
        assert_bits_equal(row, again)
    assert_close(alone[2], problem.expected(chunks[2]), 2**-7)


def test_later_keys_never_touch_earlier_rows(device: Device, rng: np.random.Generator) -> None:
    problem = AttentionProblem(AttentionCase(4, 1, 32, [(0, 40)]), rng)
    clean = problem.run(device, [Chunk(0, 0, 40)])[0]
    last_page = problem.page_table[0, 2]
    problem.v_pages[last_page, :, 5] = np.inf  # position 37
    problem.k_pages[last_page, :, 6] = np.nan  # position 38
    spoiled = problem.run(device, [Chunk(0, 0, 40)])[0]
    assert_bits_equal(spoiled[:37], clean[:37])
    assert np.isnan(spoiled[38]).all()


def test_scores_far_apart_do_not_overflow(device: Device, rng: np.random.Generator) -> None:
    problem = AttentionProblem(AttentionCase(3, 1, 64, [(20, 1)], act=np.dtype(np.float32)), rng)
    problem.q[0] = problem.q[0] * np.float32(1e4)
    chunk = problem.chunks()[0]
    assert_close(problem.run(device, [chunk])[0], problem.expected(chunk), 1e-3)
