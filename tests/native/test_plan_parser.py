"""Every rule of native/PLAN.md has a line that breaks it, and the error names that line and what was expected."""

import pytest

from engine_worker.errors import InvalidRequestError
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import TensorSource
from tests.native import tiny
from tests.native.fault_table import FaultTable

# A line put at the end of the mixed plan -> what the error says.
BAD_LINES = [
    ("", "fields separated by one space"),
    ("rope  r rotary_dim=2 theta=1", "fields separated by one space"),
    (" rope r rotary_dim=2 theta=1", "fields separated by one space"),
    ("tensor x", "record 'tensor', expected one of name, meta, act"),
    ("name mixed", "name is given twice"),
    ("act bf16", "act is given twice"),
    ("vocab 3", "vocab is given twice"),
    ("kv layers=1 kv_heads=1 head_dim=1 dtype=f32", "kv is given twice"),
    ("rope r theta=1", "expected rotary_dim=..."),
    ("rope r rotary_dim=3 theta=1", "rotary_dim 3, expected an even number"),
    ("rope r rotary_dim=2 theta=0", "theta '0', expected a number above 0"),
    ("rope r rotary_dim=2 theta=1x", "theta '1x'"),
    ("rope r rotary_dim=2 rotary_dim=2 theta=1", "key 'rotary_dim' is given twice"),
    ("rope r rotary_dim=2 theta=1 base=3", "unknown key 'base'"),
    ("rope r rotary_dim=2 theta", "word 'theta' after key=value pairs"),
    ("rope r rotary_dim= theta=1", "expected key=value"),
    ("rope r/1 rotary_dim=2 theta=1", "rope name 'r/1', expected letters, digits"),
    ("buffer x f32 T 8", "buffer x is given twice"),
    ("buffer y f64 T 8", "dtype 'f64', expected one of f32, bf16, fp8, i32"),
    ("buffer y f32 U 8", "rows 'U', expected an integer from 1"),
    ("buffer y f32 0*T 8", "rows '0', expected an integer from 1"),
    ("buffer y f32 T 0", "cols '0', expected an integer from 1"),
    ("buffer y f32 T 2147483648", "cols '2147483648', expected an integer from 1 to 2147483647"),
    ("buffer y f32 T", "expected cols"),
    ("buffer y f32 T 8 9", "unexpected word '9'"),
    ("vector v 4", "expected tensor=..."),
    ("vector v 4 tensor=t rows=0:3", "rows '0:3', expected a range of 4"),
    ("vector v 4 tensor=t rows=4:0", "rows '4:0', expected A:B with 0 <= A < B"),
    ("vector v 4 tensor=t rows=4", "rows '4', expected A:B"),
    ("matrix table f32 4 4", "matrix table is given twice"),
    ("matrix m fp4 4 4", "format 'fp4', expected one of f32, bf16, f16, fp8_channel, fp8_block"),
    ("matrix m f32 4 4", "the parts of matrix m have 0 rows, expected 4"),
    ("part tensor=t rows=0:4 cols=0:4", "part without a matrix before it"),
    ("matrix m f32 4 4\npart tensor=t rows=0:3 cols=0:4", "the parts of matrix m have 3 rows, expected 4"),
    ("matrix m f32 4 4\npart tensor=t rows=0:4 cols=0:3", "cols: a range of 3, expected 4"),
    ("matrix m f32 4 4\npart tensor=t rows=0:4 cols=0:4 scale=s", "scale=... does not belong to format f32"),
    ("matrix m fp8_channel 4 4\npart tensor=t rows=0:4 cols=0:4", "expected scale=... for format fp8_channel"),
    ("matrix m fp8_block 4 4\npart tensor=t rows=64:68 cols=0:4 scale=s", "must begin on a multiple of 128"),
    ("matrix m fp8_block 4 4\npart tensor=t rows=0:4 cols=64:68 scale=s", "must begin on a multiple of 128"),
    ("matrix m f32 5 4" + "".join(f"\npart tensor=t rows={i}:{i + 1} cols=0:4" for i in range(5)), "more than 4 parts"),
    ("placement p 3 experts=0,1", "experts: 2 numbers, expected 3"),
    ("placement p 3 experts=0,1,1", "experts '1', expected each of 0 to 2 once"),
    ("placement p 3 experts=0,1,3", "experts '3', expected each of 0 to 2 once"),
    ("placement p 3 experts=0,,1", "experts '', expected each of 0 to 2 once"),
    ("placement p 2 experts=0,1\nplacement p 2 experts=0,1", "placement p is given twice"),
    (
        "experts e f32 2 4 4 first=0 rows=0:4 cols=0:4 tensor=t.{e} placement=p",
        "placement 'p', expected one that is declared before",
    ),
    (
        "placement p 2 experts=1,0\nexperts e f32 2 4 4 first=1 rows=0:4 cols=0:4 tensor=t.{e} placement=p",
        "placement p: of 2 experts, expected at least 3",
    ),
    (
        "placement p 2 experts=1,0\nexperts e f32 2 4 4 first=0 rows=0:4 cols=0:4 tensor=t.{e} placement=p\n"
        "op moe_down l x=x down=e top_k=1 offsets=o order=r ids=i weights=w out=x",
        "down: experts e have placement 'p', the moe_route before has ''",
    ),
    ("experts e f32 2 4 4 first=-1 rows=0:4 cols=0:4 tensor=t.{e}", "first '-1', expected an integer from 0"),
    ("experts e f32 2 4 4 first=0 rows=0:3 cols=0:4 tensor=t.{e}", "rows: a range of 3, expected 4"),
    ("experts e f32 2 4 4 first=0 rows=0:4 cols=0:4 tensor=t", "tensor 't', expected {e} where the expert's id goes"),
    ("op matmul m x=x", "unknown op 'matmul'"),
    ("op quantize", "expected label"),
    ("op quantize a b x=x q=q scale=qs", "unexpected word 'b'"),
    ("op quantize m x=x q=q", "op quantize m: expected scale=..."),
    ("op quantize m x=x q=q scale=qs eps=1", "op quantize m: unknown key 'eps'"),
]


def refuse(faults: FaultTable, tensors: list[TensorSource], mixed: str, decode: str | None = None) -> str:
    decode = decode or tiny.plan("decode")
    with pytest.raises(InvalidRequestError) as caught:
        Engine.create(tiny.options(faults.path, tensors, mixed_plan=mixed, decode_plan=decode))
    return str(caught.value)


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_line_is_refused(faults: FaultTable, tensors: list[TensorSource], line: str, message: str) -> None:
    good = tiny.plan("mixed")
    error = refuse(faults, tensors, good + line + "\n")
    first = good.count("\n") + 1
    numbers = range(first, first + line.count("\n") + 2)  # a matrix is complete where the next record begins
    assert message in error
    assert any(error.startswith(f"mixed plan, line {number}: ") for number in numbers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the text is empty, expected 'glmplan 1'"),
        ("glmplan 2\n", "line 1: expected 'glmplan 1'"),
        ("name mixed\n", "line 1: expected 'glmplan 1'"),
        (tiny.plan("decode"), "line 2: name 'decode', expected mixed"),
        (tiny.plan("mixed", drop=["act f32"]), "expected a record 'act'"),
        (tiny.plan("mixed", drop=[f"vocab {tiny.VOCAB}"]), "expected a record 'vocab'"),
    ],
)
def test_text_is_refused(faults: FaultTable, tensors: list[TensorSource], text: str, message: str) -> None:
    assert message in refuse(faults, tensors, text)


def test_comments_meta_and_any_order_of_keys(faults: FaultTable, tensors: list[TensorSource]) -> None:
    more = ["# a comment", "meta model=x tp=1", "rope r theta=1e6 rotary_dim=2"]
    mixed = tiny.plan("mixed", *more)
    Engine.create(tiny.options(faults.path, tensors, mixed_plan=mixed.rstrip("\n"))).close()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (f"buffer x f32 T {tiny.HIDDEN}", "buffer x f32 T 9", "buffer x differs from line 6 of the mixed plan"),
        (f"part tensor=table rows=0:{tiny.VOCAB}", "part tensor=other rows=0:100", "matrix table differs"),
        ("act f32", "act bf16", "differ in 'act'"),
        ("vocab 100", "vocab 99", "differ in 'vocab'"),
        ("layers=2", "layers=3", "differ in 'kv'"),
    ],
)
def test_plans_agree(faults: FaultTable, tensors: list[TensorSource], old: str, new: str, message: str) -> None:
    assert message in refuse(faults, tensors, tiny.plan("mixed"), tiny.plan("decode").replace(old, new))


@pytest.mark.parametrize("count", [0, 2])
def test_one_sample_op(faults: FaultTable, tensors: list[TensorSource], count: int) -> None:
    sample = tiny.OPS[1]
    mixed = tiny.plan("mixed", *[sample] * count, drop=[sample])
    assert refuse(faults, tensors, mixed) == f"mixed plan: {count} sample ops, expected 1"
