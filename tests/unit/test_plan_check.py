"""A call whose operands do not fit is refused when it is recorded, by its label."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_worker.models.ops import Activation, Recorder
from engine_worker.plan.check import PlanError
from engine_worker.plan.record import SAMPLES, TOKENS, Buffer, KvCache, PlanName, Rope, Rows, Size
from engine_worker.weights.records import Experts, Matrix, Part, Vector, WeightFormat

KV = KvCache(layers=2, kv_heads=2, head_dim=8, dtype="bf16")
X = Buffer("x", "bf16", TOKENS, 16)
X_Q, X_SCALE = Buffer("x_q", "fp8", TOKENS, 16), Buffer("x_scale", "f32", TOKENS, 1)
PLAIN, FP8 = Activation(X, None, None), Activation(None, X_Q, X_SCALE)
OUT = Buffer("out", "bf16", TOKENS, 32)
NORM = Vector("norm", 16, "norm.weight")
IDS, WEIGHTS = Buffer("ids", "i32", TOKENS, 2), Buffer("weights", "f32", TOKENS, 2)
OFFSETS, ORDER = Buffer("offsets", "i32", Rows(Size.ONE, 5), 1), Buffer("order", "i32", Rows(Size.TOKENS, 2), 1)


def matrix(rows: int, cols: int, weight_format: WeightFormat = WeightFormat.BF16, parts: int = 1) -> Matrix:
    share = rows // parts
    return Matrix("w", weight_format, rows, cols, (Part("w.weight", (0, share), (0, cols), None, None),) * parts)


def experts(rows: int, cols: int, weight_format: WeightFormat = WeightFormat.BF16, count: int = 4) -> Experts:
    return Experts("e", weight_format, 0, count, rows, cols, "e.{e}", None)


def recorder(name: PlanName = "mixed") -> Recorder:
    return Recorder(name, "bf16", 32, KV, {})


REFUSED: dict[str, tuple[Callable[[Recorder], None], str]] = {
    "embed: vocabulary": (lambda p: p.embed("l", matrix(31, 32), out=OUT), "table=w has 31 rows, expected 32"),
    "embed: format": (
        lambda p: p.embed("l", matrix(32, 32, WeightFormat.FP8_CHANNEL), out=OUT),
        "table=w is fp8_channel, expected f32, bf16 or f16",
    ),
    "norm: weight": (
        lambda p: p.rms_norm("l", OUT, NORM, 1e-5, out=PLAIN),
        "weight=norm has 16 values, expected 32",
    ),
    "norm: delta": (
        lambda p: p.rms_norm("l", X, NORM, 1e-5, delta=OUT, out=PLAIN),
        "delta=out has 32 columns, expected 16",
    ),
    "norm: no output": (
        lambda p: p.rms_norm("l", X, NORM, 1e-5, out=Activation(None, None, None)),
        "nothing to write",
    ),
    "norm: q without scale": (
        lambda p: p.rms_norm("l", X, NORM, 1e-5, out=Activation(None, X_Q, None)),
        "q and scale come together",
    ),
    "norm: rows": (
        lambda p: p.rms_norm("l", Buffer("last", "bf16", SAMPLES, 16), NORM, 1e-5, out=PLAIN),
        "out=x has rows",
    ),
    "linear: width": (lambda p: p.linear("l", PLAIN, matrix(32, 17), out=OUT), "x=x has 16 columns, expected 17"),
    "linear: output": (lambda p: p.linear("l", PLAIN, matrix(31, 16), out=OUT), "out=out has 32 columns, expected 31"),
    "linear: plain x, FP8 weight": (
        lambda p: p.linear("l", PLAIN, matrix(32, 16, WeightFormat.FP8_CHANNEL), out=OUT),
        "w is fp8_channel and takes FP8 activations",
    ),
    "linear: FP8 x, plain weight": (
        lambda p: p.linear("l", FP8, matrix(32, 16), out=OUT),
        "w is bf16 and takes plain activations",
    ),
    "linear: scale for rows, weight in blocks": (
        lambda p: p.linear(
            "l",
            Activation(None, Buffer("q", "fp8", TOKENS, 256), X_SCALE),
            matrix(32, 256, WeightFormat.FP8_BLOCK),
            out=OUT,
        ),
        "x_scale=x_scale has 1 columns, fp8_block takes 2",
    ),
    "linear: parts": (
        lambda p: p.linear("l", PLAIN, matrix(30, 16, parts=5), out=Buffer("out", "bf16", TOKENS, 30)),
        "w=w has 5 parts, at most 4",
    ),
    "linear: samples from tokens": (
        lambda p: p.linear("l", PLAIN, matrix(32, 16), out=Buffer("logits", "f32", SAMPLES, 32)),
        "x=x has rows",
    ),
    "rope: dims": (
        lambda p: p.qk_norm_rope_store(
            "l", Buffer("qkv", "bf16", TOKENS, 64), None, heads=4, rope=Rope("r", 10, 1e4), layer=0, out=OUT
        ),
        "rope=r turns 10 dims, head_dim is 8",
    ),
    "store: layer": (
        lambda p: p.qk_norm_rope_store(
            "l", Buffer("qkv", "bf16", TOKENS, 64), None, heads=4, rope=Rope("r", 4, 1e4), layer=2, out=OUT
        ),
        "layer=2, expected 0 to 1",
    ),
    "store: q_norm": (
        lambda p: p.qk_norm_rope_store(
            "l",
            Buffer("qkv", "bf16", TOKENS, 64),
            (NORM, NORM, 1e-5),
            heads=4,
            rope=Rope("r", 4, 1e4),
            layer=0,
            out=OUT,
        ),
        "q_norm=norm has 16 values, expected 8",
    ),
    "attention: heads": (
        lambda p: p.paged_attention(
            "l",
            Buffer("q", "bf16", TOKENS, 24),
            heads=3,
            softmax_scale=1.0,
            layer=0,
            out=Buffer("o", "bf16", TOKENS, 24),
        ),
        "3 heads, expected a multiple of 2 KV heads",
    ),
    "silu_mul: odd": (
        lambda p: p.silu_mul("l", Buffer("x", "bf16", TOKENS, 15), out=PLAIN),
        "x=x has 15 columns, expected an even number",
    ),
    "group: offsets": (
        lambda p: p.moe_group("l", IDS, experts(8, 16, count=5), offsets=OFFSETS, order=ORDER),
        "offsets=offsets has rows",
    ),
    "gate and up": (
        lambda p: p.moe_gate_up(
            "l",
            PLAIN,
            experts(8, 16),
            experts(8, 16, WeightFormat.F32),
            offsets=OFFSETS,
            order=ORDER,
            out=Activation(Buffer("h", "bf16", Rows(Size.TOKENS, 2), 8), None, None),
        ),
        "gate=e is bf16 4x8x16, but up=e is f32 4x8x16",
    ),
    "sample: vocabulary": (
        lambda p: p.sample("l", Buffer("logits", "f32", SAMPLES, 31), (0, 32)),
        "logits=logits has 31 columns, expected 32",
    ),
    "sample: tokens": (
        lambda p: p.sample("l", Buffer("logits", "f32", SAMPLES, 16), (20, 36)),
        "tokens 20 to 35, expected some of 32",
    ),
    "all_reduce: rows": (
        lambda p: p.all_reduce("l", Buffer("last", "bf16", SAMPLES, 16)),
        "x=last has rows",
    ),
    "rms_norm: reduce": (
        lambda p: p.rms_norm("l", X, NORM, 1e-5, reduce=True, out=PLAIN),
        "reduce: there is no delta",
    ),
    "dispatch: form": (
        lambda p: p.moe_dispatch("l", PLAIN, IDS, experts(8, 16, WeightFormat.FP8_CHANNEL)),
        "e is fp8_channel and takes FP8 activations",
    ),
    "combine: products": (
        lambda p: p.moe_combine("l", X, experts(16, 8), ids=IDS, weights=WEIGHTS, base=None, out=X),
        "products=x has rows",
    ),
    "reduce_scatter: dtype": (lambda p: p.reduce_scatter("l", X_Q), "dtype fp8, expected bf16"),
    "all_gather: rows": (lambda p: p.all_gather("l", Buffer("last", "bf16", SAMPLES, 16)), "x=last has rows"),
    "all_reduce: dtype": (lambda p: p.all_reduce("l", X_Q), "dtype fp8, expected bf16"),
    "sample: dtype": (
        lambda p: p.sample("l", Buffer("logits", "bf16", SAMPLES, 32), (0, 32)),
        "dtype bf16, expected f32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_operands_that_do_not_fit(what: str) -> None:
    call, message = REFUSED[what]
    p = recorder()
    with p.scope("layers.1"), pytest.raises(PlanError, match="layers.1.l: ") as raised:
        call(p)
    assert message in str(raised.value)
    assert not p.plan().ops


def test_decode_samples_every_row() -> None:
    """There S is T, so logits may come straight from token rows."""
    p = recorder("decode")
    logits = Buffer("logits", "f32", SAMPLES, 32)
    p.linear("head", PLAIN, matrix(32, 16), out=logits)
    p.sample("sample", logits, (0, 32))
    assert [op.label for op in p.plan().ops] == ["head", "sample"]


def test_labels_carry_their_scopes() -> None:
    p = recorder()
    with p.scope("layers.0"):
        with p.scope("moe"):
            p.linear("down", PLAIN, matrix(32, 16), out=OUT)
        p.linear("o", PLAIN, matrix(32, 16), out=OUT)
    p.linear("head", PLAIN, matrix(32, 16), out=OUT)
    assert [op.label for op in p.plan().ops] == ["layers.0.moe.down", "layers.0.o", "head"]
