"""Attention right behind the store of its tokens, nothing waited for in between, as a decode step submits them."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi, oracle
from tests.kernels.harness import (
    ABSENT,
    BF16,
    DTYPES,
    F32,
    FP8,
    Buffer,
    Chunk,
    Device,
    SlotState,
    Step,
    assert_bits_equal,
    output,
    poison,
    tensor,
)

HEADS, HEAD_DIM, ROTARY_DIM = 12, 128, 64
WIDTH = (HEADS + 2) * HEAD_DIM
BEFORE = [1030, 0, 5, 63, 64, 130, 300, 390, 448, 511, 512, 513, 700]  # keys before the step
PAGES = max(BEFORE) // abi.PAGE_SIZE + 1


class Layer:
    """One row of each sequence; K and V are NaN from the step's tokens on."""

    def __init__(self, rng: np.random.Generator, lengths: Sequence[int], dtype: "np.dtype[Any]") -> None:
        rows = len(lengths)
        page_table = rng.permutation(rows * PAGES).astype(np.int32).reshape(rows, PAGES)
        self.step = Step([Chunk(slot, length, 1) for slot, length in enumerate(lengths)]).bind()
        self.slots = SlotState(page_table).bind()
        self.caches = []
        for _ in range(2):
            pages = poison((page_table.size, abi.PAGE_SIZE, HEAD_DIM), dtype)
            for slot, length in enumerate(lengths):
                tokens = np.arange(length)
                data = rng.standard_normal((length, HEAD_DIM)).astype(np.float32).astype(dtype)
                pages[page_table[slot, tokens // abi.PAGE_SIZE], tokens % abi.PAGE_SIZE] = data
            self.caches.append(Buffer(pages))
        self.kv = abi.KvLayer(self.caches[0].pointer, self.caches[1].pointer, DTYPES[dtype], 1, HEAD_DIM)
        tables = oracle.rope_tables(PAGES * abi.PAGE_SIZE, ROTARY_DIM)
        self.tables = [Buffer(array) for array in (np.ones(HEAD_DIM, F32), *tables)]
        self.x = tensor(rng.standard_normal((rows, 2 * WIDTH)).astype(BF16))
        self.qkv, self.q = output(rows, WIDTH, BF16), output(rows, HEADS * HEAD_DIM, BF16)
        self.outs = [output(rows, HEADS * HEAD_DIM, BF16) for _ in range(2)]

    def ops(self) -> list[tuple[abi.Op, ctypes.Structure]]:
        """What makes the queries, keys and values, their store, and attention twice."""
        rows = self.step.struct.num_rows
        store = abi.QkNormRopeStoreArgs(rows=rows, qkv=self.qkv.struct, eps=1e-5, heads=HEADS, kv=self.kv)
        store.q_norm = store.k_norm = self.tables[0].pointer
        store.rotary_dim, store.rope_cos, store.rope_sin = ROTARY_DIM, self.tables[1].pointer, self.tables[2].pointer
        store.out = self.q.struct
        store.step.contents, store.slots.contents = self.step.struct, self.slots.struct
        ops: list[tuple[abi.Op, ctypes.Structure]] = [
            (abi.Op.SILU_MUL, abi.SiluMulArgs(rows, self.x.struct, self.qkv.struct, ABSENT, ABSENT)),
            (abi.Op.QK_NORM_ROPE_STORE, store),
        ]
        for out in self.outs:
            read = abi.PagedAttentionArgs(rows=rows, q=self.q.struct, kv=self.kv, heads=HEADS, out=out.struct)
            read.softmax_scale = HEAD_DIM**-0.5
            read.step.contents, read.slots.contents = self.step.struct, self.slots.struct
            ops.append((abi.Op.PAGED_ATTENTION, read))
        return ops


@pytest.mark.parametrize("rows", [1, 4, len(BEFORE), 4 * len(BEFORE)])
@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
def test_attention_sees_the_tokens_stored_just_before(
    device: Device, rng: np.random.Generator, rows: int, dtype: "np.dtype[Any]"
) -> None:
    """The first call may read older tokens before the store has ended; the second finds all of them there."""
    layer = Layer(rng, [BEFORE[row % len(BEFORE)] for row in range(rows)], dtype)
    ops = layer.ops()
    kernels = device.table.kernels
    size = max(kernels.workspace_bytes(device.handle, op, ctypes.byref(args)) for op, args in ops)
    workspace = Buffer(poison((size,), np.uint8))
    kernels.set_workspace(device.handle, workspace.pointer, size)
    for op, args in ops:
        assert device.call(op, args) == abi.Status.OK
    device.memory.wait()
    first, second = (out.read() for out in layer.outs)
    assert not np.isnan(second.astype(F32)).any()
    assert_bits_equal(first, second)
