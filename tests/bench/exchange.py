"""The exchange of tokens over GPUs: `python -m tests.bench.exchange [--json FILE]` on a machine with several of them.

reduce_scatter and all_gather from 1 KB to 64 MB beside NCCL's, then the exchanges of one layer of GLM-4.7-FP8, with the
product whose rows go to other ranks, beside the two sums that `replicate` takes. Measured as tests.bench.collectives
does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np

from tests.bench.collectives import HIDDEN, Call, Exchange, Ranks, Sum, begin, print_sum, run_op, shape_of
from tests.bench.cuda_bench import Array, CudaBench, tensor
from tests.bench.nccl import Nccl
from tests.kernels import abi
from tests.kernels.abi import Dtype, Op

EXPERTS, TOP_K, INNER = 160, 8, 1536
ROWS = (1, 16, 64, 256, 1024, 4096)

NcclCall = Callable[[int, int, int, int], None]


def part_of(ranks: Ranks, nccl: Nccl | None, op: Op, sizes: Sequence[int]) -> Iterator[Sum]:
    """`sizes`: bytes of the whole message, of which each rank has or gets its part."""
    buffers = ranks.each(lambda bench, _: bench.fill(np.zeros(1 << 20, np.uint8), max(sizes)))
    for size in sizes:
        rows, cols = shape_of(size)
        rows, cols = (rows, cols) if rows > 1 else (len(buffers), cols // len(buffers))
        args = [abi.OP_ARGS[op](rows, tensor(buffer, Dtype.BF16, cols)) for buffer in buffers]
        times = {"this table": ranks.microseconds(run_op(op, args))}
        if nccl is not None:
            call = nccl.reduce_scatter_bf16 if op is Op.REDUCE_SCATTER else nccl.all_gather_bf16
            times["NCCL"] = ranks.microseconds(_nccl_call(call, buffers, size // 2))
        yield Sum(size, times)


def _nccl_call(of: NcclCall, buffers: Sequence[int], count: int) -> Call:
    def call(bench: CudaBench, rank: int) -> None:
        of(rank, buffers[rank], count, bench.library.glm_cuda_stream(bench.handle))

    return call


def down_weights(bench: CudaBench, count: int) -> abi.ExpertWeights:
    data = bench.fill(np.random.default_rng(0).integers(0, 0x78, 1 << 20, np.uint8), count * HIDDEN * INNER)
    scale, stride = bench.put(np.full(HIDDEN, 0.01, np.float32)), HIDDEN * INNER
    experts = (abi.Weight * count)(*(abi.Weight(data + e * stride, INNER, scale, 0, HIDDEN) for e in range(count)))
    address = bench.put(np.frombuffer(bytes(experts), np.uint8))
    return abi.ExpertWeights(address, abi.WeightFormat.FP8_CHANNEL, 0, count, HIDDEN, INNER)


def down_args(
    bench: CudaBench, rank: int, down: abi.ExpertWeights, chosen: Array, products: abi.Tensor
) -> abi.MoeDownEachArgs:
    """Of the experts that the rank has."""
    rows, first = len(chosen), rank * down.count
    local = [np.flatnonzero(chosen.reshape(-1) == expert) for expert in range(first, first + down.count)]
    order = bench.put(np.concatenate(local).astype(np.int32))
    offsets = bench.put(np.cumsum([0, *map(len, local)]).astype(np.int32))
    pattern = np.random.default_rng(1).integers(0, 0x78, 1 << 20, np.uint8)
    x = tensor(bench.fill(pattern, rows * TOP_K * INNER), Dtype.FP8_E4M3, INNER)
    x_scale = tensor(bench.put(np.full(rows * TOP_K, 0.01, np.float32)), Dtype.F32, 1)
    args = abi.MoeDownEachArgs(rows, TOP_K, x, x_scale, down, offsets, order, products)
    bench.reserve(Op.MOE_DOWN_EACH, args)
    return args


def layer_args(
    bench: CudaBench, rank: int, num_ranks: int, rows: int, down: abi.ExpertWeights
) -> dict[str, tuple[Op, object]]:
    """Each token's experts are chosen evenly."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    zeros = np.zeros(1 << 20, np.uint8)
    ids = tensor(bench.put(chosen), Dtype.I32, TOP_K)
    weights = tensor(bench.put(rng.random((rows, TOP_K)).astype(np.float32)), Dtype.F32, TOP_K)
    delta = tensor(bench.fill(zeros, rows * HIDDEN * 2), Dtype.BF16, HIDDEN)
    x = tensor(bench.fill(zeros, rows * HIDDEN), Dtype.FP8_E4M3, HIDDEN)
    x_scale = tensor(bench.fill(zeros, rows * 4), Dtype.F32, 1)
    products = tensor(bench.fill(zeros, rows * TOP_K * HIDDEN * 2), Dtype.BF16, HIDDEN)
    count = EXPERTS // num_ranks
    combine = abi.MoeCombineArgs(rows, TOP_K, count, ids, weights, products, delta, delta)
    return {
        "all_reduce, bf16": (Op.ALL_REDUCE, abi.AllReduceArgs(rows, delta)),
        "reduce_scatter, bf16": (Op.REDUCE_SCATTER, abi.ReduceScatterArgs(rows, delta)),
        "moe_dispatch, FP8": (Op.MOE_DISPATCH, abi.MoeDispatchArgs(rows, TOP_K, rank * count, count, ids, x, x_scale)),
        "moe_down_each, FP8": (Op.MOE_DOWN_EACH, down_args(bench, rank, down, chosen, products)),
        "moe_combine, bf16": (Op.MOE_COMBINE, combine),
        "all_gather, FP8": (Op.ALL_GATHER, abi.AllGatherArgs(rows, x)),
        "all_gather, scales": (Op.ALL_GATHER, abi.AllGatherArgs(rows, x_scale)),
    }


def measure_layer(ranks: Ranks, rows: int, down: Sequence[abi.ExpertWeights]) -> Iterator[Exchange]:
    num_ranks = len(ranks.benches)
    args = ranks.each(lambda bench, rank: layer_args(bench, rank, num_ranks, rows, down[rank]))
    for name, (op, _) in args[0].items():
        yield Exchange(name, rows, ranks.microseconds(run_op(op, [each[name][1] for each in args])))


def main() -> None:
    options, ranks, nccl, record = begin(__doc__)
    exchanges = []
    down = ranks.each(lambda bench, _: down_weights(bench, EXPERTS // len(ranks.benches)))
    for rows in ROWS:
        for exchange in measure_layer(ranks, rows, down):
            print(f"{exchange.name:24s} {exchange.rows:5d} rows {exchange.microseconds:8.1f} us", flush=True)
            exchanges.append(asdict(exchange))
    parts: dict[str, list[dict[str, object]]] = {}
    for op in (Op.REDUCE_SCATTER, Op.ALL_GATHER):
        print(op.name.lower())
        parts[op.name.lower()] = []
        for found in part_of(ranks, nccl, op, [1 << n for n in range(10, 27)]):
            print_sum(found)
            parts[op.name.lower()].append(asdict(found))
    if options.json:
        options.json.write_text(json.dumps({**record, "exchanges": exchanges, **parts}, indent=1) + "\n")


if __name__ == "__main__":
    main()
