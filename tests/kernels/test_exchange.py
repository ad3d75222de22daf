"""The exchange of tokens: rows that each rank has to itself, summed, gathered, sent to experts and combined again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.group import Group, count_gpus, open_group
from tests.kernels.harness import ABSENT, BF16, F32, FP8, I32, Array, Buffer, Device, Table, assert_bits_equal, tensor
from tests.kernels.matrices import BoundExperts, Format, random_activations, random_weights
from tests.kernels.test_aligned_layouts import expert_weights
from tests.kernels.test_moe import Packed, random_ids

Dtype = np.dtype[Any]
RANKS = [1, 2, 3, 8]
ROWS = [0, 1, 2, 7, 64]  # fewer than ranks, one each, and uneven


@pytest.fixture(autouse=True)
def has_exchange(table: Table) -> None:
    if not table.kernels.moe_dispatch:
        pytest.skip(f"the table {table.name} has no exchange of tokens")


@pytest.fixture(params=[*RANKS, "2 GPUs without peer access"], ids=str)
def group(table: Table, request: pytest.FixtureRequest) -> Iterator[Group]:
    ranks = request.param
    if isinstance(ranks, int):
        with open_group(table, ranks, num_threads=2) as opened:
            yield opened
        return
    if table.name != "cuda" or count_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    table.library.glm_cuda_pretend_no_peers(1)
    try:
        with open_group(table, 2) as opened:
            assert "NCCL" in opened.devices[0].description
            yield opened
    finally:
        table.library.glm_cuda_pretend_no_peers(0)


def own(rows: int, rank: int, num_ranks: int) -> slice:
    return slice(rows * rank // num_ranks, rows * (rank + 1) // num_ranks)


def numbers(rng: np.random.Generator, num_ranks: int, rows: int, cols: int, dtype: Dtype) -> list[Array]:
    return [(4 * rng.standard_normal((rows, cols))).astype(dtype) for _ in range(num_ranks)]


def owned(parts: list[Array]) -> Array:
    """Each row as its rank has it."""
    return np.concatenate([part[own(len(part), rank, len(parts))] for rank, part in enumerate(parts)])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cols", [31, 1100])
def test_reduce_scatter_sums_own_rows_in_order_of_rank(
    group: Group, rng: np.random.Generator, act: Dtype, rows: int, cols: int
) -> None:
    parts = numbers(rng, len(group.devices), rows, cols, act)
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)

    def run(rank: int, device: Device) -> Array:
        x = tensor(parts[rank], cols + 3)
        device.run(abi.Op.REDUCE_SCATTER, abi.ReduceScatterArgs(rows, x.struct))
        return x.read()

    assert_bits_equal(owned(group.each(run)), total.astype(act))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [F32, BF16, FP8, I32], ids=str)
def test_all_gather_brings_each_row_from_its_rank(
    group: Group, rng: np.random.Generator, dtype: Dtype, rows: int
) -> None:
    parts = numbers(rng, len(group.devices), rows, 37, dtype)

    def run(rank: int, device: Device) -> Array:
        x = tensor(parts[rank], 40)
        device.run(abi.Op.ALL_GATHER, abi.AllGatherArgs(rows, x.struct))
        return x.read()

    for found in group.each(run):
        assert_bits_equal(found, owned(parts))


@pytest.mark.parametrize("rows", ROWS)
def test_dispatch_brings_the_rows_that_have_local_experts_and_no_other(
    group: Group, rng: np.random.Generator, rows: int
) -> None:
    num_ranks, count = len(group.devices), 2
    ids = [random_ids(rng, rows, num_ranks * count, 2) for _ in group.devices]
    parts = numbers(rng, num_ranks, rows, 50, FP8)
    scales = [np.abs(part) for part in numbers(rng, num_ranks, rows, 1, F32)]

    def run(rank: int, device: Device) -> tuple[Array, Array, Array]:
        bound = tensor(ids[rank], 3), tensor(parts[rank], 64), tensor(scales[rank], 2)
        args = abi.MoeDispatchArgs(rows, 2, rank * count, count, *(each.struct for each in bound))
        device.run(abi.Op.MOE_DISPATCH, args)
        i, x, scale = (each.read() for each in bound)
        return i, x, scale

    all_ids = owned(ids)
    for rank, (found_ids, x, scale) in enumerate(group.each(run)):
        assert_bits_equal(found_ids, all_ids)
        taken = (all_ids // count == rank).any(axis=1)
        taken[own(rows, rank, num_ranks)] = True
        assert_bits_equal(x, np.where(taken[:, None], owned(parts), parts[rank]))
        assert_bits_equal(scale, np.where(taken[:, None], owned(scales), scales[rank]))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("with_base", [True, False])
def test_products_of_ranks_combine_to_what_one_rank_computes(
    device: Device, group: Group, rng: np.random.Generator, act: Dtype, rows: int, with_base: bool
) -> None:
    """moe_down_each on each rank's experts and moe_combine give the bits of moe_down with all of them."""
    num_ranks, count, top_k = len(group.devices), 3, 3
    experts = [random_weights(rng, Format.F32, 90, 33, gap=1) for _ in range(num_ranks * count)]
    ids = random_ids(rng, rows, num_ranks * count, top_k)
    weights = rng.random((rows, top_k)).astype(np.float32)
    base = rng.standard_normal((rows, 90)).astype(act)
    x = random_activations(rng, Format.F32, rows * top_k, 33, act)

    def operands(first: int, local: int) -> tuple[Any, ...]:
        packed = Packed(ids, first, local)
        return (
            x.bind(),
            BoundExperts(experts[first : first + local], first),
            Buffer(packed.offsets),
            Buffer(packed.order),
            tensor(ids),
            tensor(weights),
            tensor(base, 96),
        )

    def whole() -> Array:
        bound, down, offsets, order, i, w, b = operands(0, num_ranks * count)
        args = abi.MoeDownArgs(rows, top_k, bound.x.struct, bound.scale_struct, down.struct)
        args.offsets, args.order, args.ids, args.weights = offsets.pointer, order.pointer, i.struct, w.struct
        out = tensor(np.zeros((rows, 90), act))
        args.base, args.out = b.struct if with_base else ABSENT, b.struct if with_base else out.struct
        device.run(abi.Op.MOE_DOWN, args)
        return b.read() if with_base else out.read()

    def run(rank: int, of: Device) -> Array:
        bound, down, offsets, order, i, w, b = operands(rank * count, count)
        products, out = tensor(np.full((rows * top_k, 90), np.nan, act), 92), tensor(np.zeros((rows, 90), act))
        each = abi.MoeDownEachArgs(rows, top_k, bound.x.struct, bound.scale_struct, down.struct)
        each.offsets, each.order, each.out = offsets.pointer, order.pointer, products.struct
        of.run(abi.Op.MOE_DOWN_EACH, each)
        target = b if with_base else out
        args = abi.MoeCombineArgs(rows, top_k, count, i.struct, w.struct, products.struct)
        args.base, args.out = b.struct if with_base else ABSENT, target.struct
        of.run(abi.Op.MOE_COMBINE, args)
        return target.read()

    assert_bits_equal(owned(group.each(run)), whole())


@pytest.mark.parametrize("rows", [5, 40, 1100])
@pytest.mark.parametrize("fmt", [Format.FP8_CHANNEL, Format.FP8_BLOCK, Format.BF16], ids=lambda fmt: fmt.name.lower())
def test_aligned_products_of_two_ranks_combine_likewise(
    table: Table, device: Device, rng: np.random.Generator, fmt: Format, rows: int
) -> None:
    """On the paths of tensor cores, where there are any; 2 times over, as in two layers."""
    count, top_k, hidden, inner = 2, 2, 208, 256
    experts = [random_weights(rng, fmt, hidden, inner) for _ in range(2 * count)]
    ids = random_ids(rng, rows, 2 * count, top_k)
    weights = rng.random((rows, top_k)).astype(np.float32)
    x = [random_activations(rng, fmt, rows * top_k, inner, BF16) for _ in range(2)]

    def bind(layer: int, first: int, local: int) -> tuple[Any, ...]:
        packed = Packed(ids, first, local)
        down, kept = expert_weights(experts[first : first + local], 0)
        scale = x[layer].scale
        bound = tensor(x[layer].data), None if scale is None else tensor(scale)
        return down, *bound, Buffer(packed.offsets), Buffer(packed.order), kept

    def whole(layer: int) -> Array:
        down, data, scale, offsets, order, kept = bind(layer, 0, 2 * count)
        i, w, out = tensor(ids), tensor(weights), tensor(np.zeros((rows, hidden), BF16))
        args = abi.MoeDownArgs(rows, top_k, data.struct, scale.struct if scale else ABSENT, down)
        args.offsets, args.order, args.ids, args.weights = offsets.pointer, order.pointer, i.struct, w.struct
        args.base, args.out = ABSENT, out.struct
        device.run(abi.Op.MOE_DOWN, args)
        del kept
        return out.read()

    def run(rank: int, of: Device) -> list[Array]:
        products, found = tensor(np.full((rows * top_k, hidden), np.nan, BF16)), []
        for layer in range(2):
            down, data, scale, offsets, order, kept = bind(layer, rank * count, count)
            i, w, out = tensor(ids), tensor(weights), tensor(np.zeros((rows, hidden), BF16))
            each = abi.MoeDownEachArgs(rows, top_k, data.struct, scale.struct if scale else ABSENT, down)
            each.offsets, each.order, each.out = offsets.pointer, order.pointer, products.struct
            of.run(abi.Op.MOE_DOWN_EACH, each)
            args = abi.MoeCombineArgs(rows, top_k, count, i.struct, w.struct, products.struct, ABSENT, out.struct)
            of.run(abi.Op.MOE_COMBINE, args)
            del kept
            found.append(out.read())
        return found

    with open_group(table, 2) as two:
        parts = two.each(run)
    for layer in range(2):
        assert_bits_equal(owned([part[layer] for part in parts]), whole(layer))


def test_an_abort_ends_those_who_wait_and_those_who_come(table: Table) -> None:
    def run(rank: int, device: Device) -> list[int]:
        if rank == 0:  # does not come, and says so
            group.abort()
            return []
        x, ids = tensors[rank]
        return [
            device.status_of(abi.Op.REDUCE_SCATTER, abi.ReduceScatterArgs(2, x.struct)),
            device.status_of(abi.Op.ALL_GATHER, abi.AllGatherArgs(2, x.struct)),
            device.status_of(abi.Op.MOE_DISPATCH, abi.MoeDispatchArgs(2, 1, rank, 1, ids.struct, x.struct, ABSENT)),
            device.status_of(
                abi.Op.MOE_COMBINE,
                abi.MoeCombineArgs(2, 1, 1, ids.struct, x.struct, x.struct, ABSENT, x.struct),
            ),
        ]

    with open_group(table, 2) as group:
        tensors = group.each(lambda _, __: (tensor(np.ones((2, 64), np.float32)), tensor(np.ones((2, 1), np.int32))))
        assert group.each(run) == [[], [abi.Status.DEVICE_ERROR] * 4]
