"""Every argument of every op is checked when a plan is bound; the error names line, op, label and argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_worker.errors import InvalidRequestError
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import TensorSource
from tests.native import tiny
from tests.native.fault_table import FaultTable

# kv: 2 layers, 1 head of 16. H = 8 hidden, V = 100; 4 query heads: q is 64 wide, qkv 96. 6 experts of 8 -> 10.
DECLARATIONS = [
    "rope r rotary_dim=8 theta=10000",
    "rope wide rotary_dim=18 theta=10000",
    *(f"buffer {name} f32 T {cols}" for name, cols in (("y", 8), ("w20", 20), ("w10", 10), ("q64", 64), ("qkv", 96))),
    *(f"buffer {name} f32 T {cols}" for name, cols in (("a64", 64), ("ew", 2), ("one", 1))),
    *(f"buffer {name} f32 S {cols}" for name, cols in (("s8", 8), ("short", 8))),
    *(f"buffer {name} f32 2*T {cols}" for name, cols in (("inner", 10), ("inner2", 10))),
    *("buffer ids i32 T 2", "buffer offsets i32 1 7", "buffer order i32 2*T 1", "buffer few i32 3 2"),
    *("buffer q10 fp8 T 10", "buffer bf bf16 T 8", "buffer wide f32 T 300", "buffer wq fp8 T 300", "buffer ws f32 T 3"),
    *("vector v8 8 tensor=v rows=0:8", "vector v16 16 tensor=v", "vector v6 6 tensor=v rows=0:6"),
    *("matrix m f32 20 8", "part tensor=m rows=0:20 cols=0:8"),
    *("matrix fp8 fp8_channel 20 8", "part tensor=f rows=0:20 cols=0:8 scale=s"),
    *("matrix block fp8_block 20 8", "part tensor=f rows=0:20 cols=0:8 scale=bs"),
    *("matrix router f32 6 8", "part tensor=m rows=0:6 cols=0:8"),
    *("matrix biased f32 6 8", "part tensor=m rows=0:6 cols=0:8 bias=v"),
    *("matrix two f32 6 8", "part tensor=m rows=0:3 cols=0:8", "part tensor=m rows=3:6 cols=0:8"),
    *("placement swapped 6 experts=5,4,3,2,1,0", "placement five 5 experts=0,1,2,3,4"),
    "experts gate f32 6 10 8 first=0 rows=0:10 cols=0:8 tensor=e.{e}",
    "experts five f32 5 10 8 first=0 rows=0:10 cols=0:8 tensor=e.{e}",
    "experts down f32 6 8 10 first=0 rows=0:8 cols=0:10 tensor=d.{e}",
]
ROUTE = "x=x w=router bias=v6 top_k=2 groups=3 topk_groups=2 normalize=1 scale=2.5 ids=ids weights=ew"
GATE_UP = "x=x gate=gate up=gate top_k=2 offsets=offsets order=order out=inner"
DOWN = "x=inner down=down top_k=2 offsets=offsets order=order ids=ids weights=ew base=y out=y"
ROPE = "qkv=qkv q_norm=v16 k_norm=v16 eps=1e-5 heads=4 rope=r layer=1 out=q64"

GOOD = [
    "rms_norm residual=x delta=y weight=v8 eps=0 out=s8 q=q scale=qs rows=S",
    "quantize x=wide q=wq scale=ws",
    "linear x=x w=m out=w20",
    "linear x=q x_scale=qs w=fp8 out=w20",
    "linear x=q x_scale=qs w=block out=w20",
    f"qk_norm_rope_store {ROPE}",
    "qk_norm_rope_store qkv=qkv heads=4 rope=r layer=0 out=q64",
    "paged_attention q=q64 heads=4 softmax_scale=0.25 layer=0 out=a64",
    "silu_mul x=w20 out=w10 q=q10 scale=one",
    f"moe_route {ROUTE}",
    "moe_group ids=ids top_k=2 first=0 count=6 offsets=offsets order=order",
    f"moe_gate_up {GATE_UP}",
    f"moe_down {DOWN}",
    "gather_rows x=x out=s8",
]

# (a good op, its part to change, the new part, argument, message)
BAD = [
    ("linear x=x w=m out=w20", "x=x", "x=nowhere", "x: no buffer is named 'nowhere'"),
    ("linear x=x w=m out=w20", "x=x", "x=w20", "x: buffer w20 has 20 columns, expected 8"),
    ("linear x=x w=m out=w20", "x=x", "x=bf", "x: buffer bf is bf16, expected f32"),
    ("linear x=x w=m out=w20", "x=x", "x=short", "x: buffer short has 3 rows, expected 24"),
    ("linear x=x w=m out=w20", "w=m", "w=gate", "w: no matrix is named 'gate'"),
    ("linear x=x w=m out=w20", "out=w20", "out=y", "out: buffer y has 8 columns, expected 20"),
    ("linear x=x w=m out=w20", "x=x", "x=x x_scale=qs", "x_scale: does not belong to weights of format f32"),
    ("linear x=x w=m out=w20", "out=w20", "out=w20 rows=T", "rows: 'T', expected S"),
    (
        "linear x=q x_scale=qs w=fp8 out=w20",
        " x_scale=qs",
        "",
        "x_scale: expected one for weights of format fp8_channel",
    ),
    ("linear x=q x_scale=qs w=fp8 out=w20", "x_scale=qs", "x_scale=y", "x_scale: buffer y has 8 columns, expected 1"),
    ("linear x=q x_scale=qs w=fp8 out=w20", "x=q", "x=x", "x: buffer x is f32, expected fp8"),
    (
        "rms_norm residual=x delta=y weight=v8 eps=0 out=h",
        "delta=y",
        "delta=x",
        "residual: is the same buffer as delta",
    ),
    ("rms_norm residual=x weight=v8 eps=0 out=y", "out=y", "out=x", "out: is the same buffer as residual"),
    (
        "rms_norm residual=x weight=v8 eps=0 out=y",
        "weight=v8",
        "weight=v6",
        "weight: vector v6 has 6 elements, expected 8",
    ),
    ("rms_norm residual=x weight=v8 eps=0 out=y", "eps=0", "eps=-1", "eps: '-1', expected a number not below 0"),
    ("rms_norm residual=x weight=v8 eps=0 out=y", "eps=0", "eps=nan", "eps: 'nan', expected a finite number"),
    ("rms_norm residual=x weight=v8 eps=0 out=y", "out=y", "", "out: expected out, or q and scale"),
    ("rms_norm residual=x weight=v8 eps=0 out=y", "out=y", "q=q", "q: expected q and scale, or neither"),
    ("quantize x=wide q=wq scale=ws", "scale=ws", "scale=ew", "scale: has 2 columns, expected 1 or 3 for 300 columns"),
    ("embed table=table out=y", "table=table", "table=m", "table: has 20 rows, expected vocab 100"),
    ("embed table=table out=y", "table=table", "table=fp8", "table: matrix fp8 must have one part, no bias"),
    (f"qk_norm_rope_store {ROPE}", "heads=4", "heads=5", "qkv: buffer qkv has 96 columns, expected 112"),
    (f"qk_norm_rope_store {ROPE}", "k_norm=v16", "k_norm=v8", "k_norm: vector v8 has 8 elements, expected 16"),
    (f"qk_norm_rope_store {ROPE}", " eps=1e-5", "", "q_norm: expected q_norm, k_norm and eps, or none"),
    (f"qk_norm_rope_store {ROPE}", "rope=r", "rope=wide", "rope: rotates 18 dimensions, expected at most head_dim 16"),
    (f"qk_norm_rope_store {ROPE}", "layer=1", "layer=2", "layer: '2', expected an integer from 0 to 1"),
    ("paged_attention q=q64 heads=4 softmax_scale=0.25 layer=0 out=a64", "a64", "q64", "out: is the same buffer as q"),
    ("paged_attention q=q64 heads=4 softmax_scale=0.25 layer=0 out=a64", "0.25", "0", "softmax_scale: '0', expected"),
    ("silu_mul x=w20 out=w10", "x=w20", "x=one", "x: has 1 columns, expected an even number"),
    (f"moe_route {ROUTE}", "w=router", "w=biased", "w: matrix biased must have one part, no bias"),
    (f"moe_route {ROUTE}", "w=router", "w=two", "w: matrix two must have one part"),
    (f"moe_route {ROUTE}", "bias=v6", "bias=v8", "bias: vector v8 has 8 elements, expected 6"),
    (f"moe_route {ROUTE}", "top_k=2", "top_k=7", "top_k: '7', expected an integer from 1 to 6"),
    (
        f"moe_route {ROUTE}",
        "groups=3 topk_groups=2",
        "groups=4 topk_groups=2",
        "groups: 4, expected a divisor of the 6",
    ),
    (
        f"moe_route {ROUTE}",
        "groups=3 topk_groups=2",
        "groups=6 topk_groups=2",
        "groups: 6, expected at least 2 experts",
    ),
    (f"moe_route {ROUTE}", "topk_groups=2", "topk_groups=4", "topk_groups: '4', expected an integer from 1 to 3"),
    (
        f"moe_route {ROUTE}",
        "top_k=2 groups=3 topk_groups=2",
        "top_k=3 groups=3 topk_groups=1",
        "top_k: 3, expected at most",
    ),
    (f"moe_route {ROUTE} placement=swapped", "swapped", "other", "placement: no placement is named 'other'"),
    (
        f"moe_route {ROUTE} placement=swapped",
        "swapped",
        "five",
        "placement: placement five is of 5 experts, expected 6",
    ),
    (f"moe_route {ROUTE}", "normalize=1", "normalize=2", "normalize: '2', expected an integer from 0 to 1"),
    (f"moe_route {ROUTE}", "scale=2.5", "scale=0", "scale: '0', expected a number above 0"),
    (f"moe_route {ROUTE}", "ids=ids", "ids=offsets", "ids: buffer offsets has 7 columns, expected 2"),
    (GOOD[10], "count=6", "count=7", "offsets: buffer offsets has 7 elements, expected 8"),
    (GOOD[10], "order=order", "order=few", "order: buffer few has 6 elements, expected 48"),
    (GOOD[10], "order=order", "order=x", "order: buffer x is f32, expected i32"),
    (GOOD[10], "top_k=2", "top_k=33", "top_k: '33', expected an integer from 1 to 32"),
    (f"moe_gate_up {GATE_UP}", "up=gate", "up=five", "up: differs from gate in format, first, count or shape"),
    (f"moe_gate_up {GATE_UP}", "out=inner", "out=w10", "out: buffer w10 has 24 rows, expected 48"),
    (f"moe_down {DOWN}", "x=inner", "x=w10", "x: buffer w10 has 24 rows, expected 48"),
    (f"moe_down {DOWN}", "base=y out=y", "base=y out=w10", "out: buffer w10 has 10 columns, expected 8"),
    ("gather_rows x=x out=s8", "x=x", "x=short", "x: buffer short has 3 rows, expected 24"),
    ("gather_rows x=x out=s8", "out=s8", "out=x", "out: is the same buffer as x"),
]


@pytest.fixture
def sources(tmp_path: Path, tensors: list[TensorSource]) -> list[TensorSource]:
    arrays: dict[str, NDArray[Any]] = {"v": np.ones(16, np.float32), "m": np.ones((20, 8), np.float32)}
    arrays |= {"f": np.zeros((20, 8), np.uint8), "s": np.ones((20, 1), np.float32), "bs": np.ones((1, 1), np.float32)}
    arrays |= {f"e.{e}": np.ones((10, 8), np.float32) for e in range(6)}
    arrays |= {f"d.{e}": np.ones((8, 10), np.float32) for e in range(6)}
    return [*tensors, *tiny.write_shard(tmp_path / "more.safetensors", arrays)]


def labelled(op: str) -> str:
    kind, _, rest = op.partition(" ")
    return f"op {kind} here {rest}".rstrip()


def test_good_ops_bind(faults: FaultTable, sources: list[TensorSource]) -> None:
    mixed = tiny.plan("mixed", *DECLARATIONS, *map(labelled, GOOD))
    Engine.create(tiny.options(faults.path, sources, mixed_plan=mixed)).close()


@pytest.mark.parametrize(("op", "old", "new", "message"), BAD)
def test_bad_argument_is_named(
    faults: FaultTable, sources: list[TensorSource], op: str, old: str, new: str, message: str
) -> None:
    assert old in op
    mixed = tiny.plan("mixed", *DECLARATIONS, "buffer h f32 T 8", labelled(op.replace(old, new)))
    with pytest.raises(InvalidRequestError) as caught:
        Engine.create(tiny.options(faults.path, sources, mixed_plan=mixed))
    where = f"mixed plan, line {mixed.count(chr(10))}: op {op.split(maxsplit=1)[0]} here: "
    assert str(caught.value).startswith(where + message)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (None, "offsets: no moe_group before it writes this buffer"),
        (GOOD[10].replace("order=order", "order=other"), "order: is not the order of the moe_group that wrote offsets"),
        (GOOD[10].replace("ids=ids top_k=2", "ids=id top_k=1"), "top_k: 2, expected 1 as in moe_group"),
        (
            GOOD[10].replace("count=6", "count=5"),
            "offsets: moe_group has experts first=0 count=5, the weights first=0 count=6",
        ),
        (GOOD[10].replace("first=0", "first=1"), "offsets: moe_group has experts first=1"),
    ],
)
@pytest.mark.parametrize("reader", [f"moe_gate_up {GATE_UP}", f"moe_down {DOWN}"])
def test_groups_agree_with_their_readers(
    faults: FaultTable, sources: list[TensorSource], group: str | None, reader: str, message: str
) -> None:
    ops = [labelled(op) for op in (group, reader) if op]
    mixed = tiny.plan("mixed", *DECLARATIONS, "buffer other i32 2*T 1", "buffer id i32 T 1", *ops)
    with pytest.raises(InvalidRequestError) as caught:
        Engine.create(tiny.options(faults.path, sources, mixed_plan=mixed))
    assert message in str(caught.value)


def test_layers_need_a_kv_record(faults: FaultTable, sources: list[TensorSource]) -> None:
    kv = next(line for line in tiny.HEAD if line.startswith("kv"))
    mixed = tiny.plan("mixed", *DECLARATIONS, labelled(GOOD[7]), drop=[kv])
    decode = tiny.plan("decode", drop=[kv])
    with pytest.raises(InvalidRequestError, match="layer: the plan has no kv record"):
        Engine.create(tiny.options(faults.path, sources, mixed_plan=mixed, decode_plan=decode))
