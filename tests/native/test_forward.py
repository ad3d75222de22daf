"""A whole small model through the runtime and the CPU kernel table, against the same written in NumPy float64.

Dense and MoE layer, several parts, biases, column and row slices, qk-norm, partial rotation, grouped queries, pages out
of order: what the plan says is what is computed, in any chunking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import MAX_LOGPROBS
from engine_worker.runtime.records import EngineOptions, RankOptions, Sampling, StepResult
from tests.native.tiny import NO_TOKENS, batch, step, write_shard

F64 = NDArray[np.float64]
VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, ROTARY, FFN = 50, 24, 4, 2, 16, 8, 20
EXPERTS, TOP_K, SCALE, EPS, THETA = 6, 3, 2.5, 1e-5, 1e4
Q, KV = HEADS * DIM, KV_HEADS * DIM
PAGE_ORDER = [5, 2, 7, 0]
LENGTH = 50  # tokens: into the fourth page


def make_tensors() -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, HIDDEN),
        "final": (HIDDEN,),
        # Twice as wide and long as the model: the plan takes the slice in the middle.
        "head": (2 * VOCAB, 2 * HIDDEN),
        "router": (EXPERTS, HIDDEN),
        "router.bias": (EXPERTS,),
    }
    for layer in range(2):
        shapes |= {f"{layer}.{name}": (HIDDEN,) for name in ("norm", "post")}
        shapes |= {f"{layer}.{name}": (DIM,) for name in ("q_norm", "k_norm")}
        for name, rows in (("q", Q), ("k", KV), ("v", KV)):
            shapes |= {f"{layer}.{name}": (rows, HIDDEN), f"{layer}.{name}.bias": (rows,)}
        shapes[f"{layer}.o"] = (HIDDEN, Q)
    for owner in ("dense", *(f"expert.{e}" for e in range(EXPERTS))):
        shapes |= {f"{owner}.gate": (FFN, HIDDEN), f"{owner}.up": (FFN, HIDDEN), f"{owner}.down": (HIDDEN, FFN)}
    return {name: rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def part(tensor: str, rows: int, cols: int, extra: str = "", start: tuple[int, int] = (0, 0)) -> str:
    span = f"rows={start[0]}:{start[0] + rows} cols={start[1]}:{start[1] + cols}"
    return f"part tensor={tensor} {span}{extra}"


def attention_lines(layer: int) -> tuple[list[str], list[str]]:
    weights = [f"vector {layer}.{name} {HIDDEN} tensor={layer}.{name}" for name in ("norm", "post")]
    weights += [f"vector {layer}.{name} {DIM} tensor={layer}.{name}" for name in ("q_norm", "k_norm")]
    sizes = [("q", Q), ("k", KV), ("v", KV)]
    weights += [f"matrix {layer}.qkv f32 {Q + 2 * KV} {HIDDEN}"]
    weights += [part(f"{layer}.{n}", rows, HIDDEN, f" bias={layer}.{n}.bias") for n, rows in sizes]
    weights += [f"matrix {layer}.o f32 {HIDDEN} {Q}", part(f"{layer}.o", HIDDEN, Q)]
    delta = " delta=delta" if layer else ""
    ops = [
        f"op rms_norm {layer}.norm residual=resid weight={layer}.norm eps={EPS} out=h{delta}",
        f"op linear {layer}.qkv x=h w={layer}.qkv out=qkv",
        f"op qk_norm_rope_store {layer}.rope qkv=qkv q_norm={layer}.q_norm k_norm={layer}.k_norm eps={EPS} "
        f"heads={HEADS} rope=rope layer={layer} out=q",
        f"op paged_attention {layer}.attn q=q heads={HEADS} softmax_scale={DIM**-0.5} layer={layer} out=attn",
        f"op linear {layer}.o x=attn w={layer}.o out=delta",
        f"op rms_norm {layer}.post residual=resid delta=delta weight={layer}.post eps={EPS} out=h",
    ]
    return weights, ops


def make_plan(name: str) -> str:
    buffers = [("resid", HIDDEN), ("h", HIDDEN), ("delta", HIDDEN), ("qkv", Q + 2 * KV), ("q", Q), ("attn", Q)]
    buffers += [("gate_up", 2 * FFN), ("act", FFN), ("ids.w", TOP_K)]
    lines = ["glmplan 1", f"name {name}", "act f32", f"vocab {VOCAB}"]
    lines += [
        f"kv layers=2 kv_heads={KV_HEADS} head_dim={DIM} dtype=f32",
        f"rope rope rotary_dim={ROTARY} theta={THETA}",
    ]
    lines += [f"buffer {n} f32 T {cols}" for n, cols in buffers]
    lines += [f"buffer ids i32 T {TOP_K}", f"buffer offsets i32 1 {EXPERTS + 1}", f"buffer order i32 {TOP_K}*T 1"]
    lines += [f"buffer inner f32 {TOP_K}*T {FFN}", f"buffer last f32 S {HIDDEN}", f"buffer logits f32 S {VOCAB}"]
    (weights0, ops0), (weights1, ops1) = attention_lines(0), attention_lines(1)
    lines += [*weights0, *weights1, f"vector final {HIDDEN} tensor=final", f"vector bias {EXPERTS} tensor=router.bias"]
    lines += [f"matrix embed f32 {VOCAB} {HIDDEN}", part("embed", VOCAB, HIDDEN)]
    lines += [f"matrix head f32 {VOCAB} {HIDDEN}", part("head", VOCAB, HIDDEN, start=(VOCAB // 2, HIDDEN // 2))]
    lines += [f"matrix router f32 {EXPERTS} {HIDDEN}", part("router", EXPERTS, HIDDEN)]
    lines += [f"matrix dense.gu f32 {2 * FFN} {HIDDEN}"]
    lines += [part("dense.gate", FFN, HIDDEN), part("dense.up", FFN, HIDDEN)]
    lines += [f"matrix dense.down f32 {HIDDEN} {FFN}", part("dense.down", HIDDEN, FFN)]
    for n, rows, cols in (("gate", FFN, HIDDEN), ("up", FFN, HIDDEN), ("down", HIDDEN, FFN)):
        slices = f"first=0 rows=0:{rows} cols=0:{cols} tensor=expert.{{e}}.{n}"
        lines.append(f"experts {n} f32 {EXPERTS} {rows} {cols} {slices}")
    grouped = f"top_k={TOP_K} offsets=offsets order=order"
    lines += ["op embed embed table=embed out=resid", *ops0]
    lines += ["op linear 0.gu x=h w=dense.gu out=gate_up", "op silu_mul 0.act x=gate_up out=act"]
    lines += ["op linear 0.down x=act w=dense.down out=delta", *ops1]
    lines += [
        f"op moe_route 1.route x=h w=router bias=bias top_k={TOP_K} groups=1 topk_groups=1 normalize=1 scale={SCALE} "
        "ids=ids weights=ids.w",
        f"op moe_group 1.group ids=ids top_k={TOP_K} first=0 count={EXPERTS} offsets=offsets order=order",
        f"op moe_gate_up 1.gu x=h gate=gate up=up {grouped} out=inner",
        f"op moe_down 1.down x=inner down=down {grouped} ids=ids weights=ids.w out=delta",
        f"op rms_norm final residual=resid delta=delta weight=final eps={EPS} out=h",
    ]
    last = "last" if name == "mixed" else "h"
    lines += ["op gather_rows gather x=h out=last"] if name == "mixed" else []
    sampled = " rows=S" if name == "mixed" else ""
    lines += [f"op linear head x={last} w=head out=logits{sampled}", "op sample sample logits=logits"]
    return "\n".join(lines) + "\n"


class Reference:
    """The model over a whole sequence at once."""

    def __init__(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        self.w = {name: array.astype(np.float64) for name, array in tensors.items()}

    def norm(self, x: F64, weight: str) -> F64:
        out: F64 = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * self.w[weight]
        return out

    def rotate(self, x: F64) -> F64:
        half = ROTARY // 2
        angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) * 2 / ROTARY)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:ROTARY]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., ROTARY:]], -1)

    def attention(self, x: F64, layer: int) -> F64:
        def project(name: str, heads: int) -> F64:
            out: F64 = x @ self.w[f"{layer}.{name}"].T + self.w[f"{layer}.{name}.bias"]
            return out.reshape(len(x), heads, DIM)

        q = self.rotate(self.norm(project("q", HEADS), f"{layer}.q_norm"))
        k = self.rotate(self.norm(project("k", KV_HEADS), f"{layer}.k_norm")).repeat(HEADS // KV_HEADS, 1)
        v = project("v", KV_HEADS).repeat(HEADS // KV_HEADS, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out: F64 = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), Q) @ self.w[f"{layer}.o"].T
        return out

    def mlp(self, x: F64, owner: str) -> F64:
        gate, up = x @ self.w[f"{owner}.gate"].T, x @ self.w[f"{owner}.up"].T
        out: F64 = (gate / (1 + np.exp(-gate)) * up) @ self.w[f"{owner}.down"].T
        return out

    def moe(self, x: F64) -> F64:
        scores = 1 / (1 + np.exp(-x @ self.w["router"].T))
        out = np.zeros_like(x)
        for t, row in enumerate(scores):
            chosen = np.argsort(-(row + self.w["router.bias"]), kind="stable")[:TOP_K]
            weights = row[chosen] / (row[chosen].sum() + 1e-20) * SCALE
            out[t] = sum(w * self.mlp(x[t : t + 1], f"expert.{e}")[0] for e, w in zip(chosen, weights, strict=True))
        return out

    def logprobs(self, tokens: Sequence[int]) -> F64:
        """[tokens][vocab]."""
        x = self.w["embed"][list(tokens)]
        for layer in range(2):
            x = x + self.attention(self.norm(x, f"{layer}.norm"), layer)
            h = self.norm(x, f"{layer}.post")
            x = x + (self.moe(h) if layer else self.mlp(h, "dense"))
        rows, cols = slice(VOCAB // 2, VOCAB // 2 + VOCAB), slice(HIDDEN // 2, HIDDEN // 2 + HIDDEN)
        logits = self.norm(x, "final") @ self.w["head"][rows, cols].T
        out: F64 = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return out


TENSORS = make_tensors()
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB, LENGTH)]


@pytest.fixture(scope="module")
def expected() -> F64:
    return Reference(TENSORS).logprobs(TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    sources = write_shard(tmp_path_factory.mktemp("forward") / "model.safetensors", TENSORS)
    options = EngineOptions(
        kernels_path=kernel_table_path("cpu"),
        ranks=[RankOptions(make_plan("mixed"), make_plan("decode"))],
        tensors=sources,
        max_rows=LENGTH,
        max_samples=2,
        max_slots=3,
        max_context=64,
        num_pages=8,
        num_threads=2,
    )
    with Engine.create(options) as engine:
        yield engine


def updates(slot: int) -> list[tuple[int, int, int]]:
    return [(slot, index, page) for index, page in enumerate(PAGE_ORDER)]


def check(result: StepResult, sample: int, expected_row: F64) -> None:
    best = np.argsort(-expected_row, kind="stable")[:MAX_LOGPROBS]
    assert result.token_ids[sample] == best[0]
    assert result.top_ids[sample].tolist() == best.tolist()
    np.testing.assert_allclose(result.top_logprobs[sample], expected_row[best], atol=1e-4)
    np.testing.assert_allclose(result.logprobs[sample], expected_row[best[0]], atol=1e-4)


@pytest.mark.parametrize("chunks", [[LENGTH], [1] * LENGTH, [16, 16, 16, 2], [15, 1, 17, 1, 16], [49, 1]], ids=str)
def test_logprobs_equal_numpy_in_any_chunking(model: Engine, expected: F64, chunks: list[int]) -> None:
    model.bind_slot(1, Sampling(num_logprobs=MAX_LOGPROBS), NO_TOKENS, NO_TOKENS)
    start = 0
    for count in chunks:
        tokens = TOKENS[start : start + count]
        result = step(model, batch((1, start, tokens), updates=updates(1) if start == 0 else ()))
        start += count
        check(result, 0, expected[start - 1])
    model.release_slot(1)


def test_two_sequences_in_one_step(model: Engine, expected: F64) -> None:
    """One decodes while the other prefills; both share the first page, as a prefix cache would have it."""
    for slot in (0, 2):
        model.bind_slot(slot, Sampling(num_logprobs=MAX_LOGPROBS), NO_TOKENS, NO_TOKENS)
    step(model, batch((0, 0, TOKENS[:20]), updates=updates(0)))
    second = [(2, 0, PAGE_ORDER[0]), (2, 1, 1)]
    result = step(model, batch((2, 16, TOKENS[16:30]), (0, 20, TOKENS[20:21]), updates=second))
    check(result, 0, expected[29])
    check(result, 1, expected[20])
    for slot in (0, 2):
        model.release_slot(slot)
