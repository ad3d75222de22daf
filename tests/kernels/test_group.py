"""Ranks that exchange data: sums in order of rank, one token from parts of the vocabulary, and no waiting for ever."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.cases_sample import SETTINGS, Logits, Sampled, SampleProblem, coarse, counted, flat, peaked, request
from tests.kernels.group import Group, open_group
from tests.kernels.harness import F32, FP8, Array, Buffer, Device, Table, assert_bits_equal, output, tensor
from tests.kernels.quantized import outputs

Dtype = np.dtype[Any]
RANKS = [2, 3, 8]


def all_reduce(group: Group, parts: list[Array], stride: int) -> list[Array]:
    def run(rank: int, device: Device) -> Array:
        x = tensor(parts[rank], stride)
        device.run(abi.Op.ALL_REDUCE, abi.AllReduceArgs(rows=len(parts[rank]), x=x.struct))
        return x.read()

    return group.each(run)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("rows", "cols"), [(0, 64), (1, 1), (1, 31), (3, 64), (2, 5120), (37, 1100)])
def test_sums_are_in_order_of_rank_and_alike(
    table: Table, rng: np.random.Generator, act: Dtype, num_ranks: int, rows: int, cols: int
) -> None:
    parts = [(10 * rng.standard_normal((rows, cols))).astype(act) for _ in range(num_ranks)]
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    with open_group(table, num_ranks, num_threads=2) as group:
        for found in all_reduce(group, parts, cols + 3):
            assert_bits_equal(found, total.astype(act))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("gap", [0, 2], ids=["whole", "anywhere"])
@pytest.mark.parametrize(("rows", "cols"), [(0, 64), (1, 31), (3, 5120), (37, 1100), (150, 576)])
def test_a_norm_of_a_sum_is_the_sum_and_then_the_norm(
    table: Table, rng: np.random.Generator, act: Dtype, num_ranks: int, rows: int, cols: int, gap: int
) -> None:
    """gap: elements between rows; without, they are of whole packs, and their norm has one scale."""
    parts = [(3 * rng.standard_normal((rows, cols))).astype(act) for _ in range(num_ranks)]
    residual = rng.standard_normal((rows, cols)).astype(act)
    weight = rng.standard_normal(cols).astype(np.float32)

    def norm(device: Device, delta: Array, *, reduce: bool) -> list[Array]:
        x, d, w = tensor(residual, cols + 2 * gap), tensor(delta, cols + gap), Buffer(weight)
        y = output(rows, cols, act, cols + 3 * gap)
        q, scale = outputs(rows, cols, True) if gap else (output(rows, cols, FP8), output(rows, 1, F32))
        written = [x, y, q, scale]
        args = abi.RmsNormArgs(rows, x.struct, d.struct, w.pointer, 1e-5, y.struct, q.struct, scale.struct, reduce)
        device.run(abi.Op.RMS_NORM, args)
        return [target.read() for target in written]

    with open_group(table, num_ranks, num_threads=2) as group:
        sums = all_reduce(group, parts, cols)
        separately = group.each(lambda rank, device: norm(device, sums[rank], reduce=False))
        fused = group.each(lambda rank, device: norm(device, parts[rank], reduce=True))
    for found, wanted in zip(fused, separately, strict=True):
        for one, other in zip(found, wanted, strict=True):
            assert_bits_equal(one, other)


def shards(vocab: int, num_ranks: int) -> list[tuple[int, int]]:
    grains = -(-vocab // 4)
    edges = [min(vocab, 4 * (grains * rank // num_ranks)) for rank in range(num_ranks + 1)]
    return [(edges[rank], edges[rank + 1]) for rank in range(num_ranks)]


def sample(group: Group, problem: SampleProblem) -> list[Sampled]:
    parts = shards(problem.logits.shape[1], len(group.devices))
    return group.each(lambda rank, device: problem.columns(*parts[rank]).run(device))


def check_like_one(device: Device, group: Group, problem: SampleProblem) -> None:
    """Every rank has the results, slots and log-probabilities that one device has with the whole rows."""
    one = problem.run(device)
    for rank in sample(group, problem):
        assert rank.tokens.tolist() == one.tokens.tolist()
        assert (rank.last_token == one.last_token).all() and (rank.counts == one.counts).all()
        for i, asked in enumerate(problem.requests):
            if asked.num_logprobs >= 0:
                np.testing.assert_allclose(rank.logprobs[i], one.logprobs[i], atol=1e-6)
                assert rank.top_ids[i, : asked.num_logprobs].tolist() == one.top_ids[i, : asked.num_logprobs].tolist()
                best = rank.top_logprobs[i, : asked.num_logprobs]
                np.testing.assert_allclose(best, one.top_logprobs[i, : asked.num_logprobs], atol=1e-6)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("vocab", [32, 97, 1000, 20000])
@pytest.mark.parametrize("logits", [flat, peaked, coarse])
def test_parts_of_the_vocabulary_give_the_token_of_the_whole(
    device: Device, table: Table, rng: np.random.Generator, logits: Logits, vocab: int, num_ranks: int
) -> None:
    requests = [
        request(**{"seed": 11 + i, "num_logprobs": i % 4 - 1, "prompt_len": 4, **settings})
        for i, settings in enumerate(SETTINGS.values())
    ]
    count = len(requests)
    problem = SampleProblem(
        logits(rng, count, vocab), requests, list(range(10, 10 + count)), counted(rng, count, vocab)
    )
    with open_group(table, num_ranks) as group:
        check_like_one(device, group, problem)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_ties_over_ranks_go_to_the_lower_id(device: Device, table: Table, num_ranks: int) -> None:
    """All logits are equal: top-k and top-p end in the middle of the ties, on each rank in turn."""
    kinds: list[dict[str, Any]] = [{"top_k": k} for k in (1, 9, 17, 33, 40, 64)]
    kinds += [{"top_p": p} for p in (0.01, 0.2, 0.5, 0.77, 0.99)]
    kinds += [{"top_k": 33, "top_p": 0.5}, {"temperature": 0.0}]
    requests = [request(**{"seed": seed, **kind}) for kind in kinds for seed in range(5)]
    logits = np.full((len(requests), 64), 1.5, np.float32)
    with open_group(table, num_ranks) as group:
        check_like_one(device, group, SampleProblem(logits, requests, list(range(len(requests)))))


def test_bias_and_stop_ids_reach_the_rank_that_has_them(device: Device, table: Table, rng: np.random.Generator) -> None:
    requests = [
        request(temperature=0.0, bias=[(77, 60.0)]),
        request(temperature=0.0, bias=[(3, 50.0), (77, 60.0)], stop_ids=[77], min_tokens=100),
        request(bias=[(50, 30.0)], num_logprobs=2),
    ]
    with open_group(table, 3) as group:
        problem = SampleProblem(flat(rng, 3, 97), requests, [5, 6, 7])
        check_like_one(device, group, problem)
        assert sample(group, problem)[0].tokens.tolist() == [77, 3, 50]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("vocab", [97, 20000])
def test_masks_and_forced_tokens_reach_every_rank(
    device: Device, table: Table, rng: np.random.Generator, vocab: int, num_ranks: int
) -> None:
    requests = [
        request(**{"seed": 11 + i, "num_logprobs": i % 3, "prompt_len": 4, **settings})
        for i, settings in enumerate(SETTINGS.values())
    ]
    count = len(requests)
    allowed = [None if i % 4 == 0 else rng.random(vocab) < 10.0 ** -(i % 4) for i in range(count)]
    forced = [int(rng.integers(vocab)) if i % 5 == 0 else -1 for i in range(count)]
    problem = SampleProblem(
        peaked(rng, count, vocab), requests, list(range(10, 10 + count)), allowed=allowed, forced=forced
    )
    with open_group(table, num_ranks) as group:
        check_like_one(device, group, problem)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_impossible_logits_give_no_token_on_any_rank(device: Device, table: Table, num_ranks: int) -> None:
    logits = np.full((3, 40), -np.inf, np.float32)
    logits[1] = np.nan
    logits[2, 39] = 0.0  # only the last rank has a token
    requests = [request(temperature=0.0), request(top_p=0.5), request(top_k=2, num_logprobs=1)]
    with open_group(table, num_ranks) as group:
        problem = SampleProblem(logits, requests, [1, 2, 3])
        check_like_one(device, group, problem)
        assert sample(group, problem)[0].tokens.tolist() == [-1, -1, 39]


def test_an_abort_ends_those_who_wait_and_those_who_come(table: Table) -> None:
    def run(rank: int, device: Device) -> int:
        if rank == 0:  # does not come, and says so
            group.abort()
            return abi.Status.OK
        args = abi.AllReduceArgs(rows=1, x=tensors[rank].struct)
        statuses = {device.status_of(abi.Op.ALL_REDUCE, args) for _ in range(2)}
        assert len(statuses) == 1
        return statuses.pop()

    with open_group(table, 3) as group:
        tensors = group.each(lambda _, __: tensor(np.ones((1, 64), np.float32)))
        assert group.each(run) == [abi.Status.OK, abi.Status.DEVICE_ERROR, abi.Status.DEVICE_ERROR]
