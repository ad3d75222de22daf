"""The op vocabulary: one method an operation, each checks its operands and records one call.

Semantics, dtypes and rounding are those of the args struct of the same name in kernels/include/glm/kernels.h. Shapes
here are [rows][cols]; T is the tokens of a step, S its sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from engine_worker.plan.check import MAX_PARTS, OpCheck
from engine_worker.plan.record import (
    SAMPLES,
    TOKENS,
    ActDtype,
    Buffer,
    KvCache,
    Op,
    Plan,
    PlanName,
    Rope,
    Rows,
    Size,
    Value,
)
from engine_worker.weights.records import Experts, Matrix, Placement, Span, Vector


@dataclass(frozen=True, slots=True)
class Activation:
    """One value, as its readers take it: `plain` in the activations' dtype, `q` with `scale` in FP8, or both."""

    plain: Buffer | None
    q: Buffer | None
    scale: Buffer | None


class Recorder:
    """Records the calls of one kind of step."""

    def __init__(self, name: PlanName, act: ActDtype, vocab: int, kv: KvCache, meta: Mapping[str, str | int]) -> None:
        self.name = name
        self._act = act
        self._vocab = vocab
        self._kv = kv
        self._meta = MappingProxyType(dict(meta))
        self._ops: list[Op] = []
        self._scope = ""

    def plan(self) -> Plan:
        """What has been recorded."""
        return Plan(self.name, self._meta, self._act, self._vocab, self._kv, tuple(self._ops))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Labels of calls recorded inside begin with `name.`."""
        outer, self._scope = self._scope, f"{self._scope}{name}."
        yield
        self._scope = outer

    def embed(self, label: str, table: Matrix, *, out: Buffer) -> None:
        """out [T][hidden] = the table's rows of the step's tokens."""
        check = self._check(label)
        check.float_matrix("table", table)
        check.that(table.rows == self._vocab, f"table={table.name} has {table.rows} rows, expected {self._vocab}")
        check.activation("out", out, TOKENS, table.cols)
        self._record("embed", label, table=table, out=out)

    def rms_norm(
        self,
        label: str,
        residual: Buffer,
        weight: Vector,
        eps: float,
        *,
        delta: Buffer | None = None,
        reduce: bool = False,
        own: Rows | None = None,
        out: Activation,
    ) -> None:
        """residual += delta, in place; out = weight * normalised residual, in each of out's forms.

        Rows as the residual has, or `own` of them: those that the rank has to itself (here as in the other calls). With
        `reduce` the delta is summed over the ranks first, and is then used up.
        """
        check, rows, cols = self._check(label), residual.rows, residual.cols
        check.activation("residual", residual, rows, cols)
        if delta is not None:
            check.activation("delta", delta, rows, cols)
        check.vector("weight", weight, cols)
        check.that(not reduce or delta is not None, "reduce: there is no delta to sum over the ranks")
        self._check_out(check, out, rows, cols)
        forms = {"out": out.plain, "q": out.q, "scale": out.scale, "rows": own or _stated(rows)}
        added = {"delta": delta, "reduce": 1 if reduce else None}
        self._record("rms_norm", label, residual=residual, **added, weight=weight, eps=eps, **forms)

    def quantize(self, label: str, x: Buffer, *, out: Activation) -> None:
        """out.q, out.scale = FP8 of x."""
        check = self._check(label)
        check.activation("x", x, TOKENS, x.cols)
        check.that(out.q is not None and out.plain is None, "out takes the FP8 form only")
        self._check_out(check, out, TOKENS, x.cols)
        self._record("quantize", label, x=x, q=out.q, scale=out.scale)

    def linear(self, label: str, x: Activation, w: Matrix, *, own: Rows | None = None, out: Buffer) -> None:
        """out [rows][w.rows] = x w^T (+ bias). Rows as `out` has."""
        check, rows = self._check(label), out.rows
        check.that(len(w.parts) <= MAX_PARTS, f"w={w.name} has {len(w.parts)} parts, at most {MAX_PARTS} are allowed")
        operands = self._read(check, x, w, rows)
        check.buffer("out", out, ("f32", self._act), rows, w.rows)
        self._record("linear", label, **operands, w=w, out=out, rows=own or _stated(rows))

    def qk_norm_rope_store(
        self,
        label: str,
        qkv: Buffer,
        norms: tuple[Vector, Vector, float] | None,
        *,
        heads: int,
        rope: Rope,
        layer: int,
        out: Buffer,
    ) -> None:
        """Splits qkv; q and k are normed (`norms`: q_norm, k_norm, eps) and rotated; k and v go to the cache.

        q goes to out [T][heads*head_dim].
        """
        check, head_dim = self._check(label), self._kv.head_dim
        self._check_layer(check, layer)
        check.activation("qkv", qkv, TOKENS, (heads + 2 * self._kv.kv_heads) * head_dim)
        check.activation("out", out, TOKENS, heads * head_dim)
        check.that(
            rope.rotary_dim <= head_dim, f"rope={rope.name} turns {rope.rotary_dim} dims, head_dim is {head_dim}"
        )
        optional: dict[str, Value] = {}
        if norms is not None:
            q_norm, k_norm, eps = norms
            check.vector("q_norm", q_norm, head_dim)
            check.vector("k_norm", k_norm, head_dim)
            optional = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
        self._record("qk_norm_rope_store", label, qkv=qkv, **optional, heads=heads, rope=rope, layer=layer, out=out)

    def paged_attention(
        self, label: str, q: Buffer, *, heads: int, softmax_scale: float, layer: int, out: Buffer
    ) -> None:
        """out [T][heads*head_dim] = causal attention over the sequence's pages of `layer`."""
        check, cols = self._check(label), heads * self._kv.head_dim
        self._check_layer(check, layer)
        check.that(
            heads % self._kv.kv_heads == 0, f"{heads} heads, expected a multiple of {self._kv.kv_heads} KV heads"
        )
        check.activation("q", q, TOKENS, cols)
        check.activation("out", out, TOKENS, cols)
        self._record("paged_attention", label, q=q, heads=heads, softmax_scale=softmax_scale, layer=layer, out=out)

    def silu_mul(self, label: str, x: Buffer, *, own: Rows | None = None, out: Activation) -> None:
        """out [T][n] = silu(x[:, :n]) * x[:, n:], in each of out's forms."""
        check = self._check(label)
        check.activation("x", x, TOKENS, x.cols)
        check.that(x.cols % 2 == 0, f"x={x.name} has {x.cols} columns, expected an even number")
        self._check_out(check, out, TOKENS, x.cols // 2)
        self._record("silu_mul", label, x=x, out=out.plain, q=out.q, scale=out.scale, rows=own)

    def moe_route(
        self,
        label: str,
        x: Activation,
        w: Matrix,
        bias: Vector | None,
        *,
        groups: int,
        topk_groups: int,
        normalize: bool,
        scale: float,
        ids: Buffer,
        weights: Buffer,
        placement: Placement | None = None,
        own: Rows | None = None,
    ) -> None:
        """ids, weights [T][top_k]: each token's experts, best first, and what their outputs are multiplied by.

        Experts are chosen by id, and written as their places.
        """
        check, top_k = self._check(label), ids.cols
        check.float_matrix("w", w)
        operands = self._read(check, x, w, TOKENS)
        if bias is not None:
            check.vector("bias", bias, w.rows)
        check.that(w.rows % groups == 0, f"{w.rows} experts, expected a multiple of {groups} groups")
        check.that(top_k <= w.rows, f"top_k is {top_k} of {w.rows} experts")
        if placement is not None:
            holds_each_once = sorted(placement.experts) == list(range(w.rows))
            check.that(holds_each_once, f"placement={placement.name} does not hold each of {w.rows} experts once")
        check.buffer("ids", ids, "i32", TOKENS, top_k)
        check.buffer("weights", weights, "f32", TOKENS, top_k)
        rule: dict[str, Value] = {
            "top_k": top_k,
            "groups": groups,
            "topk_groups": topk_groups,
            "normalize": int(normalize),
            "scale": scale,
        }
        outputs: dict[str, Value | None] = {"ids": ids, "weights": weights, "placement": placement, "rows": own}
        self._record("moe_route", label, **operands, w=w, bias=bias, **rule, **outputs)

    def moe_group(self, label: str, ids: Buffer, experts: Experts, *, offsets: Buffer, order: Buffer) -> None:
        """order lists the assignments expert by expert, offsets [count + 1] where each expert's begin."""
        check, top_k = self._check(label), ids.cols
        check.buffer("ids", ids, "i32", TOKENS, top_k)
        check.buffer("offsets", offsets, "i32", Rows(Size.ONE, experts.count + 1), 1)
        check.buffer("order", order, "i32", Rows(Size.TOKENS, top_k), 1)
        shard = {"first": experts.first, "count": experts.count}
        self._record("moe_group", label, ids=ids, top_k=top_k, **shard, offsets=offsets, order=order)

    def moe_gate_up(
        self, label: str, x: Activation, gate: Experts, up: Experts, *, offsets: Buffer, order: Buffer, out: Activation
    ) -> None:
        """out [T*top_k][intermediate] = silu(gate_e x) * up_e x for each assignment, in each of out's forms."""
        check = self._check(label)
        check.that(
            (gate.format, gate.count, gate.rows, gate.cols, gate.placement)
            == (up.format, up.count, up.rows, up.cols, up.placement),
            f"gate={gate.name} is {gate.format.value} {gate.count}x{gate.rows}x{gate.cols}, but up={up.name} is "
            f"{up.format.value} {up.count}x{up.rows}x{up.cols}",
        )
        operands = self._read(check, x, gate, TOKENS)
        self._check_out(check, out, order.rows, gate.rows)
        forms = {"out": out.plain, "q": out.q, "scale": out.scale}
        grouping: dict[str, Value] = {"top_k": order.rows.factor, "offsets": offsets, "order": order}
        self._record("moe_gate_up", label, **operands, gate=gate, up=up, **grouping, **forms)

    def moe_down(
        self,
        label: str,
        x: Activation,
        down: Experts,
        *,
        offsets: Buffer,
        order: Buffer,
        ids: Buffer,
        weights: Buffer,
        base: Buffer | None,
        out: Buffer,
    ) -> None:
        """out [T][hidden] = base + the weighted sum of each token's experts; out may be base."""
        check, top_k = self._check(label), ids.cols
        operands = self._read(check, x, down, order.rows)
        check.buffer("ids", ids, "i32", TOKENS, top_k)
        check.buffer("weights", weights, "f32", TOKENS, top_k)
        if base is not None:
            check.activation("base", base, TOKENS, down.rows)
        check.activation("out", out, TOKENS, down.rows)
        grouping: dict[str, Value] = {
            "top_k": top_k,
            "offsets": offsets,
            "order": order,
            "ids": ids,
            "weights": weights,
        }
        self._record("moe_down", label, **operands, down=down, **grouping, base=base, out=out)

    def all_reduce(self, label: str, x: Buffer) -> None:
        """x [T][cols] = the sum of all ranks' x, in place."""
        check = self._check(label)
        check.activation("x", x, TOKENS, x.cols)
        self._record("all_reduce", label, x=x)

    def reduce_scatter(self, label: str, x: Buffer) -> None:
        """x [T][cols] = the sum of all ranks' x, in place, in the rows that the rank has to itself."""
        self._check(label).activation("x", x, TOKENS, x.cols)
        self._record("reduce_scatter", label, x=x)

    def all_gather(self, label: str, x: Buffer) -> None:
        """x [T][cols]: each row as the rank has it that has it to itself, in place."""
        self._check(label).buffer("x", x, x.dtype, TOKENS, x.cols)
        self._record("all_gather", label, x=x)

    def moe_dispatch(self, label: str, x: Activation, ids: Buffer, experts: Experts) -> None:
        """In place: all rows of ids [T][top_k], and those rows of x, in the experts' form, that have one of them."""
        check = self._check(label)
        check.buffer("ids", ids, "i32", TOKENS, ids.cols)
        operands = self._read(check, x, experts, TOKENS)
        shard = {"top_k": ids.cols, "first": experts.first, "count": experts.count}
        self._record("moe_dispatch", label, ids=ids, **operands, **shard)

    def moe_down_each(
        self, label: str, x: Activation, down: Experts, *, offsets: Buffer, order: Buffer, out: Buffer
    ) -> None:
        """out [T*top_k][hidden]: the product of each assignment that the order lists."""
        check = self._check(label)
        operands = self._read(check, x, down, order.rows)
        check.activation("out", out, order.rows, down.rows)
        grouping: dict[str, Value] = {"top_k": order.rows.factor, "offsets": offsets, "order": order}
        self._record("moe_down_each", label, **operands, down=down, **grouping, out=out)

    def moe_combine(
        self,
        label: str,
        products: Buffer,
        experts: Experts,
        *,
        ids: Buffer,
        weights: Buffer,
        base: Buffer | None,
        out: Buffer,
    ) -> None:
        """out [T][hidden], in the rank's own rows: as moe_down, with each product from the rank that has the expert."""
        check, top_k = self._check(label), ids.cols
        check.buffer("ids", ids, "i32", TOKENS, top_k)
        check.buffer("weights", weights, "f32", TOKENS, top_k)
        check.activation("products", products, Rows(Size.TOKENS, top_k), out.cols)
        if base is not None:
            check.activation("base", base, TOKENS, out.cols)
        check.activation("out", out, TOKENS, out.cols)
        shard = {"top_k": top_k, "count": experts.count}
        operands: dict[str, Value | None] = {"ids": ids, "weights": weights, "products": products, "base": base}
        self._record("moe_combine", label, **operands, **shard, out=out)

    def gather_rows(self, label: str, x: Buffer, *, out: Buffer) -> None:
        """out [S] = the sampled rows of x [T]."""
        check = self._check(label)
        check.activation("x", x, TOKENS, x.cols)
        check.activation("out", out, SAMPLES, x.cols)
        self._record("gather_rows", label, x=x, out=out)

    def sample(self, label: str, logits: Buffer, tokens: Span) -> None:
        """The next token of each sampled row, whose logits are of `tokens`; other ranks have the others."""
        check, (first, end) = self._check(label), tokens
        check.that(0 <= first < end <= self._vocab, f"tokens {first} to {end - 1}, expected some of {self._vocab}")
        check.buffer("logits", logits, "f32", SAMPLES, end - first)
        whole = tokens == (0, self._vocab)
        self._record("sample", label, logits=logits, first=None if whole else first)

    def _check(self, label: str) -> OpCheck:
        return OpCheck(self.name, self._act, self._scope + label)

    def _check_layer(self, check: OpCheck, layer: int) -> None:
        check.that(0 <= layer < self._kv.layers, f"layer={layer}, expected 0 to {self._kv.layers - 1}")

    def _check_out(self, check: OpCheck, out: Activation, rows: Rows, cols: int) -> None:
        check.that(out.plain is not None or out.q is not None, "nothing to write: out has no form")
        if out.plain is not None:
            check.activation("out", out.plain, rows, cols)
        check.quantized(("q", "scale"), out.q, out.scale, rows, cols)

    def _read(self, check: OpCheck, x: Activation, w: Matrix | Experts, rows: Rows) -> dict[str, Value]:
        """The form of x that w takes, as arguments."""
        if not w.format.is_fp8:
            check.that(x.plain is not None, f"{w.name} is {w.format.value} and takes plain activations")
            assert x.plain is not None
            check.activation("x", x.plain, rows, w.cols)
            return {"x": x.plain}
        check.that(x.q is not None and x.scale is not None, f"{w.name} is {w.format.value} and takes FP8 activations")
        assert x.q is not None and x.scale is not None
        check.quantized(("x", "x_scale"), x.q, x.scale, rows, w.cols)
        check.scales_suit(x.scale, w.format, w.cols)
        return {"x": x.q, "x_scale": x.scale}

    def _record(self, kind: str, label: str, **args: Value | None) -> None:
        present = {key: value for key, value in args.items() if value is not None}
        self._ops.append(Op(kind, self._scope + label, MappingProxyType(present)))


def _stated(rows: Rows) -> Rows | None:
    """`rows` is stated only where it is not T."""
    return None if rows == TOKENS else rows
