"""Decode kernels of the CUDA table at the shapes of rank 0 of TP8/EP8 of GLM-4.7.

`python -m tests.bench.kernels_cuda [name ...]` prints time, bytes and share of the read bandwidth of each case. Weights
and caches rotate over more memory than the L2 holds.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.bench.cuda_bench import Array, CudaBench, tensor
from tests.kernels import abi
from tests.kernels.abi import Dtype, Op, WeightFormat

HIDDEN, HEADS, HEAD_DIM, VOCAB = 5120, 12, 128, 151552
EXPERTS, LOCAL, TOP_K, INNER = 160, 20, 8, 1536
ROTATED_BYTES = 400 << 20
DECODE_ROWS = 256  # past these the arithmetic is the floor

rng = np.random.default_rng(7)


def fp8_noise(size: int = 32 << 20) -> Array:
    codes = rng.integers(0, 0x60, size, np.uint8)
    noise: Array = codes | rng.integers(0, 2, size, np.uint8) << 7
    return noise


def bf16_noise(count: int = 16 << 20) -> Array:
    noise: Array = (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return noise


class Suite:
    def __init__(self, bench: CudaBench, wanted: list[str]) -> None:
        self.bench, self.wanted = bench, wanted
        self.fp8, self.bf16 = fp8_noise(), bf16_noise()
        self.read_gb_s = self._read_bandwidth()

    def _read_bandwidth(self) -> float:
        size = 4 << 30
        data = self.bench.fill(self.fp8, size)
        read = partial(self.bench.call, "glm_cuda_read", ctypes.c_void_p(data), ctypes.c_size_t(size))
        gb_s = size / self.bench.microseconds([read]) / 1e3
        self.bench.call("glm_cuda_memory_free", ctypes.c_void_p(data))
        print(f"{self.bench.kernels.device_description(self.bench.handle).decode()}: reads {gb_s:.0f} GB/s")
        return gb_s

    def report(self, name: str, us: float, size: int) -> None:
        gb_s = size / us / 1e3
        print(
            f"{name:44s} {us:9.2f} us {size / 1e6:9.1f} MB {gb_s:7.0f} GB/s {100 * gb_s / self.read_gb_s:5.1f} %",
            flush=True,
        )

    def report_flops(self, name: str, us: float, flops: float) -> None:
        print(f"{name:44s} {us:9.2f} us {flops / us / 1e6:9.1f} TFLOP/s", flush=True)

    def skip(self, name: str) -> bool:
        return bool(self.wanted) and not any(name.startswith(prefix) for prefix in self.wanted)

    def act(self, rows: int, cols: int) -> abi.Tensor:
        return tensor(self.bench.fill(self.bf16, rows * cols * 2), Dtype.BF16, cols)

    def quantized(self, rows: int, cols: int) -> tuple[abi.Tensor, abi.Tensor]:
        scale = self.bench.put(np.full((rows, 1), 0.01, np.float32))
        return tensor(self.bench.fill(self.fp8, rows * cols), Dtype.FP8_E4M3, cols), tensor(scale, Dtype.F32, 1)

    def time(self, op: Op, all_args: Sequence[ctypes.Structure]) -> float:
        self.bench.reserve(op, all_args[0])
        return self.bench.microseconds([partial(self.bench.run, op, args) for args in all_args])

    def linear(self, rows: int, n: int, k: int, fmt: WeightFormat) -> None:
        name = f"linear {fmt.name.lower()} {n}x{k} M={rows}"
        if self.skip(name):
            return
        fp8 = fmt == WeightFormat.FP8_CHANNEL
        weight_bytes = n * k * (1 if fp8 else 2)
        x, x_scale = self.quantized(rows, k) if fp8 else (self.act(rows, k), abi.Tensor())
        out = tensor(self.bench.alloc(rows * n * 4), Dtype.F32 if not fp8 else Dtype.BF16, n)
        scale = self.bench.put(np.full(n, 0.01, np.float32)) if fp8 else None
        count = max(4, ROTATED_BYTES // weight_bytes)
        data = self.bench.fill(self.fp8 if fp8 else self.bf16, count * weight_bytes)
        all_args = []
        for i in range(count):
            args = abi.LinearArgs(rows, 1, fmt, x, x_scale)
            args.parts[0] = abi.Weight(data + i * weight_bytes, k, scale, 0, n)
            args.out = out
            all_args.append(args)
        us = self.time(Op.LINEAR, all_args)
        self.report(name, us, weight_bytes)
        if rows > DECODE_ROWS:
            self.report_flops(name, us, 2 * rows * n * k)
        self.bench.call("glm_cuda_memory_free", ctypes.c_void_p(data))

    def _experts(self, rows: int, cols: int) -> tuple[int, abi.ExpertWeights]:
        data = self.bench.fill(self.fp8, LOCAL * rows * cols)
        scale = self.bench.put(np.full(rows, 0.01, np.float32))
        structs = (abi.Weight * LOCAL)(
            *(abi.Weight(data + e * rows * cols, cols, scale, 0, rows) for e in range(LOCAL))
        )
        array = self.bench.put(np.frombuffer(bytes(structs), np.uint8))
        return data, abi.ExpertWeights(array, WeightFormat.FP8_CHANNEL, 0, LOCAL, rows, cols)

    def experts(self, rows: int) -> None:
        if self.skip("experts"):
            return
        ids = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        flat = ids.reshape(-1)
        order = np.concatenate([np.flatnonzero(flat == e) for e in range(LOCAL)]).astype(np.int32)
        offsets = np.cumsum([0, *((flat == e).sum() for e in range(LOCAL))]).astype(np.int32)
        touched = int((np.diff(offsets) > 0).sum())
        address, at = self.bench.put(order), self.bench.put(offsets)
        x, x_scale = self.quantized(rows, HIDDEN)
        act = tensor(self.bench.alloc(rows * TOP_K * INNER * 2), Dtype.BF16, INNER)
        q, scale = self.quantized(rows * TOP_K, INNER)
        sets = [
            (self._experts(INNER, HIDDEN), self._experts(INNER, HIDDEN), self._experts(HIDDEN, INNER)) for _ in range(2)
        ]
        ups, downs = [], []
        ids_tensor = tensor(self.bench.put(ids), Dtype.I32, TOP_K)
        weights = tensor(self.bench.put(rng.random((rows, TOP_K)).astype(np.float32)), Dtype.F32, TOP_K)
        for (_, gate), (_, up), (_, down) in sets:
            ups.append(
                abi.MoeGateUpArgs(
                    rows, TOP_K, x, x_scale, gate, up, at, address, abi.Tensor(None, Dtype.BF16, INNER, INNER), q, scale
                )
            )
            base = self.act(rows, HIDDEN)
            downs.append(abi.MoeDownArgs(rows, TOP_K, q, scale, down, at, address, ids_tensor, weights, base, base))
        del act
        name = f"{rows} tokens, {len(order)} rows on {touched} experts"
        one = INNER * HIDDEN
        gate_up_us, down_us = self.time(Op.MOE_GATE_UP, ups), self.time(Op.MOE_DOWN, downs)
        self.report(f"experts gate_up {name}", gate_up_us, touched * 2 * one)
        self.report(f"experts down {name}", down_us, touched * one)
        both = []
        for first, second in zip(ups, downs, strict=True):
            both += [partial(self.bench.run, Op.MOE_GATE_UP, first), partial(self.bench.run, Op.MOE_DOWN, second)]
        pair_us = 2 * self.bench.microseconds(both)
        self.report(f"experts gate_up, down {name}", pair_us, touched * 3 * one)
        if rows > DECODE_ROWS:
            self.report_flops(f"experts gate_up {name}", gate_up_us, 4 * len(order) * one)
            self.report_flops(f"experts down {name}", down_us, 2 * len(order) * one)
        for group in sets:
            for data, _ in group:
                self.bench.call("glm_cuda_memory_free", ctypes.c_void_p(data))

    def step(self, seqs: int, context: int, vocab: int = 1) -> tuple[abi.StepInputs, abi.Slots, int]:
        pages = -(-context // abi.PAGE_SIZE)
        table = rng.permutation(seqs * pages).astype(np.int32)
        put = self.bench.put
        rows = np.arange(seqs, dtype=np.int32)
        outs = [self.bench.alloc(seqs * abi.MAX_LOGPROBS * 4) for _ in range(4)]
        any_token = put(np.full(seqs, -1, np.int32))
        step = abi.StepInputs(
            seqs, seqs, seqs, put(rows), put(np.full(seqs, context - 1, np.int32)), put(rows), put(rows),
            put(np.arange(seqs + 1, dtype=np.int32)), put(rows), put(rows), *outs,
            any_token, any_token,
        )  # fmt: skip
        requests = (abi.Sampling * seqs)(
            *(
                abi.Sampling(seed=i, temperature=1.0, top_p=0.95, repetition_penalty=1.0, num_logprobs=-1)
                for i in range(seqs)
            )
        )
        counts = self.bench.fill(np.zeros(1 << 20, np.uint8), seqs * vocab * 2)
        slots = abi.Slots(
            put(np.frombuffer(bytes(requests), np.uint8)), put(rows), put(table), counts, seqs, pages, vocab
        )
        return step, slots, seqs * pages

    def attention(self, seqs: int, context: int, dtype: Dtype) -> None:
        name = f"attention {dtype.name.lower()} {seqs} x {context}"
        if self.skip(name):
            return
        step, slots, pages = self.step(seqs, context)
        element = 2 if dtype == Dtype.BF16 else 1
        page_bytes = abi.PAGE_SIZE * HEAD_DIM * element
        count = max(1, min(8, ROTATED_BYTES // (2 * pages * page_bytes)))
        noise = self.bf16 if dtype == Dtype.BF16 else self.fp8
        data = self.bench.fill(noise, count * 2 * pages * page_bytes)
        q, out = self.act(seqs, HEADS * HEAD_DIM), self.act(seqs, HEADS * HEAD_DIM)
        all_args = []
        for i in range(count):
            k = data + 2 * i * pages * page_bytes
            args = abi.PagedAttentionArgs(rows=seqs, q=q, heads=HEADS, softmax_scale=HEAD_DIM**-0.5, out=out)
            args.step.contents, args.slots.contents = step, slots
            args.kv = abi.KvLayer(k, k + pages * page_bytes, dtype, 1, HEAD_DIM)
            all_args.append(args)
        self.report(name, self.time(Op.PAGED_ATTENTION, all_args), 2 * seqs * context * HEAD_DIM * element)
        self.bench.call("glm_cuda_memory_free", ctypes.c_void_p(data))

    def prefill(self, rows: int, before: int = 0) -> None:
        name = f"prefill {rows} rows after {before}"
        if self.skip(name):
            return
        step, slots, pages = self.step(1, before + rows)
        put = self.bench.put
        step.num_rows, step.num_seqs = rows, 1
        step.positions = put(np.arange(before, before + rows, dtype=np.int32))
        step.row_slots = put(np.zeros(rows, np.int32))
        step.seq_starts = put(np.array([0, rows], np.int32))
        page_bytes = abi.PAGE_SIZE * HEAD_DIM * 2
        k = self.bench.fill(self.bf16, 2 * pages * page_bytes)
        q, out = self.act(rows, HEADS * HEAD_DIM), self.act(rows, HEADS * HEAD_DIM)
        args = abi.PagedAttentionArgs(rows=rows, q=q, heads=HEADS, softmax_scale=HEAD_DIM**-0.5, out=out)
        args.step.contents, args.slots.contents = step, slots
        args.kv = abi.KvLayer(k, k + pages * page_bytes, Dtype.BF16, 1, HEAD_DIM)
        us = self.time(Op.PAGED_ATTENTION, [args] * 4)
        self.report_flops(name, us, 4 * HEADS * HEAD_DIM * (rows * before + rows * (rows + 1) // 2))
        self.bench.call("glm_cuda_memory_free", ctypes.c_void_p(k))

    def sample(self, rows: int, sigma: float) -> None:
        name = f"sample {rows} x {VOCAB} top_p 0.95 sigma {sigma:g}"
        if self.skip(name):
            return
        step, slots, _ = self.step(rows, 100, VOCAB)
        logits = (rng.standard_normal((rows, VOCAB), np.float32) * sigma).astype(np.float32)
        args = abi.SampleArgs(rows=rows, logits=tensor(self.bench.put(logits), Dtype.F32, VOCAB))
        args.step.contents, args.slots.contents = step, slots
        self.report(name, self.time(Op.SAMPLE, [args] * 4), logits.nbytes)

    def small(self, rows: int) -> None:
        if self.skip("small"):
            return
        x, delta = self.act(rows, HIDDEN), self.act(rows, HIDDEN)
        q, scale = self.quantized(rows, HIDDEN)
        weight = self.bench.put(np.ones(HIDDEN, np.float32))
        norm = abi.RmsNormArgs(rows, x, delta, weight, 1e-5, abi.Tensor(), q, scale)
        self.report(f"small rms_norm M={rows}", self.time(Op.RMS_NORM, [norm] * 40), rows * HIDDEN * 7)
        self.report(
            f"small quantize M={rows}",
            self.time(Op.QUANTIZE, [abi.QuantizeArgs(rows, x, q, scale)] * 40),
            rows * HIDDEN * 3,
        )
        wide = self.act(rows, 2 * INNER)
        inner_q, inner_scale = self.quantized(rows, INNER)
        silu = abi.SiluMulArgs(rows, wide, abi.Tensor(), inner_q, inner_scale)
        self.report(f"small silu_mul M={rows}", self.time(Op.SILU_MUL, [silu] * 40), rows * INNER * 5)
        gate = abi.Weight(self.bench.put(rng.standard_normal((EXPERTS, HIDDEN), np.float32)), HIDDEN, None, 0, EXPERTS)
        ids, weights = (
            tensor(self.bench.alloc(rows * TOP_K * 4), Dtype.I32, TOP_K),
            tensor(self.bench.alloc(rows * TOP_K * 4), Dtype.F32, TOP_K),
        )
        bias = self.bench.put(np.zeros(EXPERTS, np.float32))
        route = abi.MoeRouteArgs(rows, x, gate, WeightFormat.F32, bias, EXPERTS, TOP_K, 1, 1, 1, 2.5, ids, weights)
        self.report(f"small moe_route M={rows}", self.time(Op.MOE_ROUTE, [route] * 40), EXPERTS * HIDDEN * 4)
        offsets, order = self.bench.alloc(4 * (LOCAL + 1)), self.bench.alloc(4 * rows * TOP_K)
        group = abi.MoeGroupArgs(rows, ids, TOP_K, 0, LOCAL, offsets, order)
        self.report(f"small moe_group M={rows}", self.time(Op.MOE_GROUP, [group] * 40), rows * TOP_K * 4)
        self._qk(rows)

    def _qk(self, rows: int) -> None:
        step, slots, pages = self.step(rows, 4096)
        kv_bytes = pages * abi.PAGE_SIZE * HEAD_DIM * 2
        width = (HEADS + 2) * HEAD_DIM
        ones = self.bench.put(np.ones(HEAD_DIM, np.float32))
        rope = self.bench.put(np.ones((4096, 32), np.float32))
        args = abi.QkNormRopeStoreArgs(
            rows=rows, qkv=self.act(rows, width), q_norm=ones, k_norm=ones, eps=1e-5, heads=HEADS
        )
        args.rotary_dim, args.rope_cos, args.rope_sin = 64, rope, rope
        args.kv = abi.KvLayer(self.bench.alloc(kv_bytes), self.bench.alloc(kv_bytes), Dtype.BF16, 1, HEAD_DIM)
        args.out = self.act(rows, HEADS * HEAD_DIM)
        args.step.contents, args.slots.contents = step, slots
        self.report(
            f"small qk_norm_rope_store M={rows}", self.time(Op.QK_NORM_ROPE_STORE, [args] * 40), rows * width * 4
        )


def cases(suite: Suite) -> list[Callable[[], Any]]:
    fp8, bf16 = WeightFormat.FP8_CHANNEL, WeightFormat.BF16
    shapes = [(1792, 5120), (5120, 1536), (3072, 5120), (384, 5120), (5120, 192)]
    return [
        *(partial(suite.linear, rows, n, k, fp8) for n, k in shapes for rows in (1, 16, 64)),
        *(partial(suite.linear, rows, 18944, 5120, bf16) for rows in (1, 16, 64)),
        *(partial(suite.linear, 8192, n, k, fp8) for n, k in [(12288, 5120), *shapes[:3]]),
        *(partial(suite.experts, rows) for rows in (1, 4, 8, 16, 64, 256, 8192)),
        *(partial(suite.attention, 64, context, Dtype.BF16) for context in (256, 1024, 4096, 8192, 32768)),
        *(partial(suite.attention, 1, context, Dtype.BF16) for context in (256, 4096, 32768)),
        partial(suite.attention, 16, 4096, Dtype.BF16),
        *(partial(suite.attention, seqs, 4096, Dtype.FP8_E4M3) for seqs in (1, 64, 256)),
        *(partial(suite.attention, seqs, 1024, Dtype.FP8_E4M3) for seqs in (64, 256)),
        *(partial(suite.prefill, rows) for rows in (512, 1024, 4096, 8192, 16384)),
        partial(suite.prefill, 2048, 14336),
        *(partial(suite.sample, 64, sigma) for sigma in (1.0, 3.0)),
        *(partial(suite.small, rows) for rows in (1, 64)),
    ]


def main() -> None:
    suite = Suite(CudaBench(), sys.argv[1:])
    for case in cases(suite):
        case()


if __name__ == "__main__":
    main()
