from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.kernels import abi, oracle
from tests.kernels.cases_rows import QK_CASES, QkCase
from tests.kernels.harness import (
    BF16,
    DTYPES,
    F32,
    FP8,
    Array,
    Buffer,
    Chunk,
    Device,
    F64Array,
    SlotState,
    Step,
    assert_bits_equal,
    assert_close,
    output,
    poison,
    tensor,
)

EPS = 1e-5
MAX_PAGES = 6
TOLERANCE = {F32: 2e-6, BF16: 2**-6, FP8: 2**-3}


@dataclass
class Inputs:
    case: QkCase
    step: Step
    qkv: Array
    q_norm: Array
    k_norm: Array
    cos: Array
    sin: Array
    page_table: Array

    def part(self, first: int, rows: int) -> "Inputs":
        """Only these rows, which must be of one sequence."""
        chunk = Chunk(int(self.step.row_slots[first]), int(self.step.positions[first]), rows)
        return Inputs(**{**vars(self), "step": Step([chunk]), "qkv": self.qkv[first : first + rows]})


@dataclass
class Result:
    q: Array
    k: Array  # pages
    v: Array


def make(case: QkCase, rng: np.random.Generator, act: "np.dtype[Any]") -> Inputs:
    step = Step([Chunk(slot, start, rows) for slot, (start, rows) in enumerate(case.spans)])
    width = (case.heads + 2 * case.kv_heads) * case.head_dim
    qkv = (2 * rng.standard_normal((step.rows, width))).astype(act)
    norms = rng.standard_normal((2, case.head_dim)).astype(np.float32)
    slots = max(len(case.spans), 1)
    page_table = rng.permutation(slots * MAX_PAGES).astype(np.int32).reshape(slots, MAX_PAGES)
    cos, sin = oracle.rope_tables(MAX_PAGES * abi.PAGE_SIZE, case.rotary_dim)
    return Inputs(case, step, qkv, norms[0], norms[1], cos, sin, page_table)


def run(device: Device, inputs: Inputs, kv_dtype: "np.dtype[Any]", gaps: tuple[int, int] = (2, 3)) -> Result:
    """gaps: elements between the rows of qkv, and of out."""
    case, act = inputs.case, inputs.qkv.dtype
    qkv, q_cols = tensor(inputs.qkv, inputs.qkv.shape[1] + gaps[0]), case.heads * case.head_dim
    out = output(inputs.step.rows, q_cols, act, q_cols + gaps[1])
    shape = (inputs.page_table.size, case.kv_heads, abi.PAGE_SIZE, case.head_dim)
    k, v = Buffer(poison(shape, kv_dtype)), Buffer(poison(shape, kv_dtype))
    slots, step = SlotState(inputs.page_table).bind(), inputs.step.bind()
    tables = [Buffer(array) for array in (inputs.q_norm, inputs.k_norm, inputs.cos, inputs.sin)]
    args = abi.QkNormRopeStoreArgs(rows=inputs.step.rows, qkv=qkv.struct, eps=EPS, heads=case.heads, out=out.struct)
    args.step.contents, args.slots.contents = step.struct, slots.struct
    args.q_norm, args.k_norm = (tables[0].pointer, tables[1].pointer) if case.norm else (None, None)
    args.rotary_dim, args.rope_cos, args.rope_sin = case.rotary_dim, tables[2].pointer, tables[3].pointer
    args.kv = abi.KvLayer(k.pointer, v.pointer, DTYPES[kv_dtype], case.kv_heads, case.head_dim)
    device.run(abi.Op.QK_NORM_ROPE_STORE, args)
    return Result(out.read(), k.read(), v.read())


def expected(inputs: Inputs) -> tuple[F64Array, F64Array, F64Array]:
    """q, k and v of every row, [rows][heads][head_dim]."""
    case, rows = inputs.case, inputs.step.rows
    heads = inputs.qkv.astype(np.float64).reshape(rows, case.heads + 2 * case.kv_heads, case.head_dim)
    q, k, v = np.split(heads, [case.heads, case.heads + case.kv_heads], axis=1)
    if case.norm:
        q = oracle.normalize(q, inputs.q_norm.astype(np.float64), EPS, inputs.qkv.dtype)
        k = oracle.normalize(k, inputs.k_norm.astype(np.float64), EPS, inputs.qkv.dtype)
    positions = inputs.step.positions
    return oracle.rope(q, positions, inputs.cos, inputs.sin), oracle.rope(k, positions, inputs.cos, inputs.sin), v


def stored(pages: Array, inputs: Inputs) -> tuple[Array, Array]:
    """The tokens of this step, [rows][kv_heads][head_dim], and all other tokens."""
    positions, slots = inputs.step.positions, inputs.step.row_slots
    ids = inputs.page_table[slots, positions // abi.PAGE_SIZE]
    written = np.zeros((pages.shape[0], abi.PAGE_SIZE), bool)
    written[ids, positions % abi.PAGE_SIZE] = True
    tokens = pages.transpose(0, 2, 1, 3)
    return tokens[ids, positions % abi.PAGE_SIZE], tokens[~written]


def check(result: Result, inputs: Inputs, kv_dtype: "np.dtype[Any]") -> None:
    act = inputs.qkv.dtype
    q, k, v = expected(inputs)
    assert_close(result.q, q.reshape(result.q.shape), TOLERANCE[act])
    k_tokens, k_rest = stored(result.k, inputs)
    v_tokens, v_rest = stored(result.v, inputs)
    assert_close(k_tokens, k, max(TOLERANCE[act], TOLERANCE[kv_dtype]))
    exact = np.clip(v, -448, 448) if kv_dtype == FP8 else v
    assert v_tokens.tobytes() == exact.astype(np.float32).astype(kv_dtype).tobytes()
    for rest in (k_rest, v_rest):
        assert rest.tobytes() == poison(rest.shape, kv_dtype).tobytes(), "another token was written"


@pytest.mark.parametrize("kv_dtype", [BF16, F32, FP8], ids=str)
@pytest.mark.parametrize("case", QK_CASES, ids=str)
def test_matches_float64(
    device: Device, rng: np.random.Generator, case: QkCase, act: "np.dtype[Any]", kv_dtype: "np.dtype[Any]"
) -> None:
    inputs = make(case, rng, act)
    check(run(device, inputs, kv_dtype), inputs, kv_dtype)


def test_only_the_first_rotary_dims_rotate(device: Device, rng: np.random.Generator) -> None:
    inputs = make(QkCase(2, 1, 128, 64, False, ((40, 3),)), rng, np.dtype(np.float32))
    result = run(device, inputs, F32)
    q_in = inputs.qkv.reshape(3, 4, 128)[:, :2]
    q_out = result.q.reshape(3, 2, 128)
    assert_bits_equal(q_out[..., 64:].copy(), q_in[..., 64:].copy())
    assert (q_out[..., :64] != q_in[..., :64]).all()


def test_head_norm_covers_one_head_not_the_whole_row(device: Device, rng: np.random.Generator) -> None:
    inputs = make(QkCase(2, 1, 64, 0, True, ((0, 1),)), rng, np.dtype(np.float32))
    before = run(device, inputs, F32)
    inputs.qkv[:, :64] *= 100  # the first query head only
    after = run(device, inputs, F32)
    assert_bits_equal(after.q[:, 64:].copy(), before.q[:, 64:].copy())
    assert_close(after.q[:, :64], before.q[:, :64], 1e-4)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    inputs = make(QkCase(9, 3, 64, 32, True, ((0, 49), (3, 40))), rng, BF16)
    crowd, elsewhere = run(device, inputs, BF16), run(other_device, inputs, BF16)
    assert_bits_equal(crowd.q, elsewhere.q)
    assert_bits_equal(crowd.k, elsewhere.k)
    for first, rows in [(0, 1), (15, 2), (48, 1), (49, 33)]:
        part = inputs.part(first, rows)
        alone = run(device, part, BF16)
        assert_bits_equal(alone.q, crowd.q[first : first + rows])
        for pages, others in ((alone.k, crowd.k), (alone.v, crowd.v)):
            assert_bits_equal(stored(pages, part)[0], stored(others, part)[0])
