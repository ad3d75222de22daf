"""What only the CUDA table has: several ways for a sum to go, and graphs of exchanges."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.graphs import record
from tests.kernels.group import Group, count_gpus, open_group
from tests.kernels.harness import ABSENT, BF16, Array, BoundTensor, Device, Table, assert_bits_equal, output, tensor
from tests.kernels.matrices import Format, random_weights
from tests.kernels.test_beside import AlignedWeight

BY_SIZE, ONE_SHOT, TWO_SHOTS, IN_PLACE = range(4)


@pytest.fixture
def cuda(table: Table) -> Iterator[Table]:
    if table.name != "cuda":
        pytest.skip("of the CUDA table only")
    yield table
    table.library.glm_cuda_set_reduce_path(BY_SIZE)


def reduce_args(x: BoundTensor) -> abi.AllReduceArgs:
    return abi.AllReduceArgs(rows=x.buffer.shape[0], x=x.struct)


@pytest.mark.parametrize("path", [ONE_SHOT, TWO_SHOTS, IN_PLACE], ids=["one shot", "two shots", "in place"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (5, 31), (64, 5120), (200, 1100)])
def test_every_path_gives_the_same_bits(
    cuda: Table, rng: np.random.Generator, act: np.dtype[Any], num_ranks: int, rows: int, cols: int, path: int
) -> None:
    parts = [(10 * rng.standard_normal((rows, cols))).astype(act) for _ in range(num_ranks)]
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)

    def run(rank: int, device: Device) -> Array:
        x = tensor(parts[rank], cols + 8)
        device.run(abi.Op.ALL_REDUCE, reduce_args(x))
        return x.read()

    cuda.library.glm_cuda_set_reduce_path(path)
    with open_group(cuda, num_ranks) as group:
        for _ in range(3):  # both sets of slots, and the first again
            for found in group.each(run):
                assert_bits_equal(found, total.astype(act))


@pytest.mark.parametrize(("rows", "cols"), [(1, 8), (5, 31), (37, 1100), (64, 5120), (129, 4096)])
def test_gpus_without_peer_access_give_the_same_bits(
    cuda: Table, rng: np.random.Generator, act: np.dtype[Any], rows: int, cols: int
) -> None:
    """Through host memory, and from 128 KB on through NCCL."""
    if count_gpus() < 2:
        pytest.skip("needs 2 GPUs")
    parts = [(10 * rng.standard_normal((rows, cols))).astype(act) for _ in range(2)]
    total = parts[0].astype(np.float32) + parts[1].astype(np.float32)

    def run(rank: int, device: Device) -> Array:
        x = tensor(parts[rank], cols + 8)
        device.run(abi.Op.ALL_REDUCE, reduce_args(x))
        return x.read()

    cuda.library.glm_cuda_pretend_no_peers(1)
    with open_group(cuda, 2) as group:
        cuda.library.glm_cuda_pretend_no_peers(0)
        assert "NCCL" in group.devices[0].description
        for _ in range(3):
            for found in group.each(run):
                assert_bits_equal(found, total.astype(act))


def replay(group: Group, path: int, shape: tuple[int, int]) -> list[Array]:
    """What x is after 5 replays of a graph of 3 sums of it.

    No graph is made while another rank runs: on a shared GPU that would wait for a kernel that waits for this rank.
    """

    def make(_: int, device: Device) -> tuple[BoundTensor, ctypes.c_void_p]:
        x = tensor(np.ones(shape, np.float32))
        return x, record(device, [(abi.Op.ALL_REDUCE, reduce_args(x))] * 3)

    def run(rank: int, device: Device) -> Array:
        x, graph = made[rank]
        for _ in range(5):
            assert device.table.kernels.graph_launch(device.handle, graph) == abi.Status.OK
        return x.read()

    group.devices[0].table.library.glm_cuda_set_reduce_path(path)
    made = group.each(make)
    found = group.each(run)
    for device, (_, graph) in zip(group.devices, made, strict=True):
        device.table.kernels.graph_free(device.handle, graph)
    return found


@pytest.mark.parametrize("path", [ONE_SHOT, TWO_SHOTS, IN_PLACE], ids=["one shot", "two shots", "in place"])
def test_graphs_of_sums_are_replayed(cuda: Table, path: int) -> None:
    with open_group(cuda, 2) as group:
        for found in replay(group, path, (3, 640)):
            assert (found == 2.0**15).all()


@pytest.mark.parametrize("rows", [1, 6, 131])
def test_graphs_of_the_exchange_of_tokens_are_replayed(cuda: Table, rows: int) -> None:
    """By all four operations y becomes the sum of both ranks' x, each time anew."""

    def make(rank: int, device: Device) -> tuple[list[BoundTensor], ctypes.c_void_p]:
        ids = tensor(np.array([[row % 2] for row in range(rows)], np.int32))
        weights = tensor(np.ones((rows, 1), np.float32))
        x, y = (tensor(np.zeros((rows, 640), np.float32)) for _ in range(2))
        combine = abi.MoeCombineArgs(rows, 1, 1, ids.struct, weights.struct, x.struct, ABSENT, y.struct)
        graph = record(
            device,
            [
                (abi.Op.REDUCE_SCATTER, abi.ReduceScatterArgs(rows, x.struct)),
                (abi.Op.MOE_DISPATCH, abi.MoeDispatchArgs(rows, 1, rank, 1, ids.struct, x.struct, ABSENT)),
                (abi.Op.MOE_COMBINE, combine),
                (abi.Op.ALL_GATHER, abi.AllGatherArgs(rows, y.struct)),
            ],
        )
        return [x, y, ids, weights], graph

    def run(rank: int, device: Device) -> list[Array]:
        (x, y, *_), graph = made[rank]
        found = []
        for value in (1, 2, 3):
            own = np.full((rows, 640), 10 * value + rank, np.float32)
            kernels = device.table.kernels
            assert kernels.copy_in(device.handle, x.buffer.pointer, own.ctypes.data, own.nbytes) == abi.Status.OK
            assert kernels.graph_launch(device.handle, graph) == abi.Status.OK
            found.append(y.read())
        return found

    with open_group(cuda, 2) as group:
        made = group.each(make)
        for found in group.each(run):
            for value, y in zip((1, 2, 3), found, strict=True):
                assert (y == 20 * value + 1).all()
        for device, (_, graph) in zip(group.devices, made, strict=True):
            device.table.kernels.graph_free(device.handle, graph)


@pytest.mark.parametrize("rows", [1, 6, 64])
def test_a_product_beside_the_dispatch_gives_the_same_bits(cuda: Table, rng: np.random.Generator, rows: int) -> None:
    """As the shared expert's, which starts while rows are on their way; a round reads what the one before wrote."""
    weights = [random_weights(rng, Format.BF16, n, k) for n, k in ((640, 256), (256, 640))]
    hidden = rng.standard_normal((rows, 256)).astype(BF16)
    parts = [rng.standard_normal((rows, 640)).astype(BF16) for _ in range(2)]
    to_other = np.array([[row % 2] for row in range(rows)], np.int32)

    def product(x: BoundTensor, weight: AlignedWeight, out: BoundTensor) -> abi.LinearArgs:
        args = abi.LinearArgs(rows, 1, Format.BF16, x.struct, ABSENT)
        args.parts[0], args.out = weight.struct, out.struct
        return args

    def run(rank: int, device: Device, *, one_by_one: bool) -> list[Array]:
        up, down = map(AlignedWeight, weights)
        ids, x, h, delta = tensor(to_other), tensor(parts[rank]), tensor(hidden), output(rows, 640, BF16)
        calls = [
            (abi.Op.MOE_DISPATCH, abi.MoeDispatchArgs(rows, 1, rank, 1, ids.struct, x.struct, ABSENT)),
            (abi.Op.LINEAR, product(h, up, delta)),
            (abi.Op.LINEAR, product(delta, down, h)),
        ]
        for op, args in calls * 12:
            assert device.call(op, args) == abi.Status.OK
            if one_by_one:
                device.memory.wait()
        return [each.read() for each in (x, delta, h)]

    # Where ranks share a GPU a call here does not return while the other rank waits; why is not known.
    with open_group(cuda, 2, ranks_per_gpu=1) as group:
        expected = group.each(partial(run, one_by_one=True))
        for found, wanted in zip(group.each(partial(run, one_by_one=False)), expected, strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert_bits_equal(one, other)
