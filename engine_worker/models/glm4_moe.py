"""GLM-4.5, 4.5-Air, 4.6 and 4.7: the weights they need and the calls that make a step.

    x += attention(norm(x)); x += mlp(norm(x))      in each layer; then norm and head

The residual stream stays in `resid`; a block's output waits in `delta` and is added by the next norm. With several
ranks a block's output is a partial sum on each, and that norm adds it up over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_worker.models.config import ModelConfig
from engine_worker.models.exchange import Exchange, check_exchange, gather_forms, in_whole, own_rows
from engine_worker.models.layout import WHOLE, Layout, check_layout
from engine_worker.models.ops import Activation, Recorder
from engine_worker.models.placement import ExpertPlacement
from engine_worker.models.scratch import MlpScratch, Scratch
from engine_worker.plan.record import Buffer, KvCache, KvDtype, Plan, PlanName, Rows
from engine_worker.weights.manifest import Declarer
from engine_worker.weights.records import Experts, Matrix, Placement, Span, Vector


@dataclass(frozen=True, slots=True)
class MlpWeights:
    gate_up: Matrix  # [2*width][hidden]
    down: Matrix  # [hidden][width]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    router: Matrix  # [experts][hidden]
    router_bias: Vector  # [experts]: for the choice only
    gate: Experts  # each [width][hidden]
    up: Experts
    down: Experts  # each [hidden][width]
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: Vector  # [hidden]
    qkv: Matrix  # [(heads + 2*kv_heads)*head_dim][hidden]
    qk_norm: tuple[Vector, Vector] | None  # [head_dim] each
    o: Matrix  # [hidden][heads*head_dim]
    mlp_norm: Vector  # [hidden]
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class Weights:
    embed: Matrix  # [vocab][hidden]
    layers: tuple[LayerWeights, ...]
    norm: Vector  # [hidden]
    head: Matrix  # [vocab][hidden]


def declare_weights(m: Declarer, c: ModelConfig) -> Weights:
    """Declare what the model reads and waive what it knows and does not read."""
    weights = Weights(
        embed=m.matrix("embed", [("model.embed_tokens", c.vocab_size)], c.hidden_size),
        layers=tuple(_declare_layer(m, c, i) for i in range(c.num_hidden_layers)),
        norm=m.vector("norm", "model.norm.weight", c.hidden_size),
        head=m.matrix(
            "head", [("model.embed_tokens" if c.tie_word_embeddings else "lm_head", c.vocab_size)], c.hidden_size
        ),
    )
    m.waive("model.rotary_emb.inv_freq")
    for i in range(c.num_hidden_layers, c.num_hidden_layers + c.num_nextn_predict_layers):
        m.waive_prefix(f"model.layers.{i}.")  # multi-token prediction: the main model does not read it
    return weights


def _declare_layer(m: Declarer, c: ModelConfig, i: int) -> LayerWeights:
    name, at = f"layers.{i}", f"model.layers.{i}"
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    qkv = [(f"{at}.self_attn.q_proj", q), (f"{at}.self_attn.k_proj", kv), (f"{at}.self_attn.v_proj", kv)]
    qk_norm = None
    if c.use_qk_norm:
        qk_norm = (
            m.vector(f"{name}.attn.q_norm", f"{at}.self_attn.q_norm.weight", c.head_dim),
            m.vector(f"{name}.attn.k_norm", f"{at}.self_attn.k_norm.weight", c.head_dim),
        )
    for scale in ("k_scale", "v_scale"):
        m.require_unit_scale(f"{at}.self_attn.{scale}")
    m.waive(f"{at}.self_attn.rotary_emb.inv_freq")
    return LayerWeights(
        attn_norm=m.vector(f"{name}.attn.norm", f"{at}.input_layernorm.weight", c.hidden_size),
        qkv=m.matrix(f"{name}.attn.qkv", qkv, c.hidden_size, bias=c.attention_bias),
        qk_norm=qk_norm,
        o=m.matrix(f"{name}.attn.o", [(f"{at}.self_attn.o_proj", c.hidden_size)], q),
        mlp_norm=m.vector(f"{name}.mlp.norm", f"{at}.post_attention_layernorm.weight", c.hidden_size),
        mlp=_declare_mlp(m, c, f"{name}.mlp", f"{at}.mlp", c.intermediate_size)
        if i < c.first_k_dense_replace
        else _declare_moe(m, c, f"{name}.moe", f"{at}.mlp"),
    )


def _declare_mlp(m: Declarer, c: ModelConfig, name: str, at: str, width: int) -> MlpWeights:
    return MlpWeights(
        gate_up=m.matrix(f"{name}.gate_up", [(f"{at}.gate_proj", width), (f"{at}.up_proj", width)], c.hidden_size),
        down=m.matrix(f"{name}.down", [(f"{at}.down_proj", c.hidden_size)], width),
    )


def _declare_moe(m: Declarer, c: ModelConfig, name: str, at: str) -> MoeWeights:
    count, width, expert = c.n_routed_experts, c.moe_intermediate_size, f"{at}.experts.{{e}}"
    shared = None
    if c.n_shared_experts:
        shared = _declare_mlp(m, c, f"{name}.shared", f"{at}.shared_experts", c.n_shared_experts * width)
    return MoeWeights(
        router=m.matrix(f"{name}.router", [(f"{at}.gate", count)], c.hidden_size),
        router_bias=m.vector(f"{name}.router_bias", f"{at}.gate.e_score_correction_bias", count),
        gate=m.experts(f"{name}.gate", f"{expert}.gate_proj", count, width, c.hidden_size),
        up=m.experts(f"{name}.up", f"{expert}.up_proj", count, width, c.hidden_size),
        down=m.experts(f"{name}.down", f"{expert}.down_proj", count, c.hidden_size, width),
        shared=shared,
    )


def place_experts(w: Weights, placement: ExpertPlacement) -> Weights:
    """With the experts of each layer in the order that `placement` has for it."""
    return replace(w, layers=tuple(_place(layer, placement.of_layer(i)) for i, layer in enumerate(w.layers)))


def _place(w: LayerWeights, order: tuple[int, ...] | None) -> LayerWeights:
    if order is None or isinstance(w.mlp, MlpWeights):
        return w
    placement = Placement(w.mlp.gate.name.removesuffix("gate") + "placement", order)
    gate, up, down = (replace(each, placement=placement) for each in (w.mlp.gate, w.mlp.up, w.mlp.down))
    return replace(w, mlp=replace(w.mlp, gate=gate, up=up, down=down))


def shard(w: Weights, c: ModelConfig, layout: Layout, exchange: Exchange = "replicate") -> Weights:
    """What the layout's rank holds of the whole model's weights."""
    layers = tuple(_shard_layer(layer, c, layout, exchange) for layer in w.layers)
    return replace(w, layers=layers, head=w.head.take_rows([layout.vocab(c)]))


def _shard_layer(w: LayerWeights, c: ModelConfig, layout: Layout, exchange: Exchange) -> LayerWeights:
    """Column-parallel in, row-parallel out: what lies between needs nothing of other ranks."""
    q = _columns(layout.heads(c), c)
    kv = _columns(layout.kv_heads(c), c)
    if isinstance(w.mlp, MlpWeights):
        mlp: MlpWeights | MoeWeights = _shard_mlp(w.mlp, layout.width(c.intermediate_size, c))
    else:
        mlp = _shard_moe(w.mlp, c, layout, exchange)
    return replace(w, qkv=w.qkv.take_rows([q, kv, kv]), o=w.o.take_cols(q), mlp=mlp)


def _columns(heads: Span, c: ModelConfig) -> Span:
    return heads[0] * c.head_dim, heads[1] * c.head_dim


def _shard_mlp(w: MlpWeights, width: Span) -> MlpWeights:
    return MlpWeights(gate_up=w.gate_up.take_rows([width, width]), down=w.down.take_cols(width))


def _shard_moe(w: MoeWeights, c: ModelConfig, layout: Layout, exchange: Exchange) -> MoeWeights:
    experts, width = layout.experts(c), layout.expert_width(c)
    shared = w.shared
    if shared and exchange == "all_to_all":
        shared = MlpWeights(in_whole(shared.gate_up), in_whole(shared.down))
    elif shared:
        shared = _shard_mlp(shared, layout.width(c.n_shared_experts * c.moe_intermediate_size, c))
    return replace(
        w,
        gate=w.gate.take(experts).take_rows(width),
        up=w.up.take(experts).take_rows(width),
        down=w.down.take(experts).take_cols(width),
        shared=shared,
    )


def record_step(
    name: PlanName,
    c: ModelConfig,
    w: Weights,
    kv_dtype: KvDtype,
    layout: Layout = WHOLE,
    *,
    exchange: Exchange = "replicate",
) -> Plan:
    """The calls of one step on the layout's rank; `w` are the whole model's weights.

    `mixed` samples S of T rows; `decode` samples each of its rows. Raises ConfigError if the layout does not suit the
    model or the exchange.
    """
    check_layout(layout, c)
    check_exchange(layout, exchange)
    w = shard(w, c, layout, exchange)
    first_kv, end_kv = layout.kv_heads(c)
    kv = KvCache(c.num_hidden_layers, end_kv - first_kv, c.head_dim, kv_dtype)
    p = Recorder(name, c.activation_dtype, c.vocab_size, kv, {"model": "glm4_moe", **layout.meta})
    s = Scratch.for_rank(c, layout)
    p.embed("embed", w.embed, out=s.resid)
    delta, own, spread = None, own_rows(layout, exchange), None
    for i, layer in enumerate(w.layers):
        with p.scope(f"layers.{i}"):
            attention(p, c, s, layer, layout, i=i, delta=delta, spread=spread)
            if isinstance(layer.mlp, MoeWeights) and own:
                spread = own
                exchanged_moe(p, c, s, layer, layer.mlp, own=own)
            else:
                mlp(p, c, s, layer, layout)
        delta = s.delta
    head(p, c, s, w, layout, spread=spread)
    return p.plan()


def attention(
    p: Recorder,
    c: ModelConfig,
    s: Scratch,
    w: LayerWeights,
    layout: Layout,
    *,
    i: int,
    delta: Buffer | None,
    spread: Rows | None,
) -> None:
    """delta = o(softmax(q k^T / sqrt(head_dim)) v), with q, k, v from norm(resid + delta).

    `spread`: resid and delta are in the rank's own rows only, and delta is no partial sum.
    """
    first, end = layout.heads(c)
    heads = end - first
    x = s.x.for_readers(w.qkv)
    reduce = layout.exchanges and delta is not None and spread is None
    p.rms_norm("attn.norm", s.resid, w.attn_norm, c.rms_norm_eps, delta=delta, reduce=reduce, own=spread, out=x)
    if spread:
        gather_forms(p, "attn.gather", x)
    p.linear("attn.qkv", x, w.qkv, out=s.qkv)
    norms = None if w.qk_norm is None else (*w.qk_norm, c.rms_norm_eps)
    p.qk_norm_rope_store("attn.rope_store", s.qkv, norms, heads=heads, rope=s.rope, layer=i, out=s.q)
    p.paged_attention("attn.core", s.q, heads=heads, softmax_scale=c.head_dim**-0.5, layer=i, out=s.attn.plain)
    attn = s.attn.for_readers(w.o)
    if attn.q:
        p.quantize("attn.quantize", s.attn.plain, out=attn)
    p.linear("attn.o", attn, w.o, out=s.delta)


def mlp(p: Recorder, c: ModelConfig, s: Scratch, w: LayerWeights, layout: Layout) -> None:
    """delta = mlp(norm(resid + delta)): dense in the first layers, experts in the others."""
    if isinstance(w.mlp, MlpWeights):
        x = s.x.for_readers(w.mlp.gate_up)
        p.rms_norm("mlp.norm", s.resid, w.mlp_norm, c.rms_norm_eps, delta=s.delta, reduce=layout.exchanges, out=x)
        with p.scope("mlp"):
            swiglu(p, x, w.mlp, s.dense, out=s.delta)
    else:
        shared = [w.mlp.shared.gate_up] if w.mlp.shared else []
        x = s.x.for_readers(w.mlp.router, w.mlp.gate, *shared)
        p.rms_norm("mlp.norm", s.resid, w.mlp_norm, c.rms_norm_eps, delta=s.delta, reduce=layout.exchanges, out=x)
        with p.scope("moe"):
            moe(p, c, s, x, w.mlp)


def swiglu(p: Recorder, x: Activation, w: MlpWeights, s: MlpScratch, *, out: Buffer) -> None:
    """out = down(silu(gate x) * up x); Shazeer 2020."""
    p.linear("gate_up", x, w.gate_up, out=s.gate_up)
    hidden = s.hidden.for_readers(w.down)
    p.silu_mul("silu_mul", s.gate_up, out=hidden)
    p.linear("down", hidden, w.down, out=out)


def route(p: Recorder, c: ModelConfig, s: Scratch, x: Activation, w: MoeWeights, *, own: Rows | None = None) -> None:
    """ids, weights: the token's top_k experts."""
    p.moe_route(
        "route",
        x,
        w.router,
        w.router_bias,
        groups=c.n_group,
        topk_groups=c.topk_group,
        normalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        ids=s.ids,
        weights=s.weights,
        placement=w.gate.placement,
        own=own,
    )


def choose(p: Recorder, c: ModelConfig, s: Scratch, x: Activation, w: MoeWeights, *, own: Rows | None = None) -> None:
    """offsets, order: which rows which expert takes; and delta = shared(x).

    The shared expert's calls alternate with those that choose experts and bring them their rows: neighbours then need
    nothing of each other, and a kernel table may run them side by side. But in a decode step without exchange the
    router comes first: a table that records it as a graph may make the shared expert a branch, which waits for less
    than the routed experts do, and whose kernels should not be in the router's way.
    """
    router_first = p.name == "decode" and not own
    shared = s.whole_shared if own else s.shared
    hidden = shared.hidden.for_readers(w.shared.down) if w.shared else None
    if router_first:
        route(p, c, s, x, w)
    if w.shared:
        p.linear("shared.gate_up", x, w.shared.gate_up, own=own, out=shared.gate_up)
    if not router_first:
        route(p, c, s, x, w, own=own)
    if hidden:
        p.silu_mul("shared.silu_mul", shared.gate_up, own=own, out=hidden)
    if own:
        p.moe_dispatch("dispatch", x, s.ids, w.gate)
    if w.shared and hidden:
        p.linear("shared.down", hidden, w.shared.down, own=own, out=s.delta)
    p.moe_group("group", s.ids, w.gate, offsets=s.offsets, order=s.order)


def moe(p: Recorder, c: ModelConfig, s: Scratch, x: Activation, w: MoeWeights) -> None:
    """delta = shared(x) + sum of weight_e * expert_e(x) over the token's top_k experts."""
    choose(p, c, s, x, w)
    products = s.expert_hidden.for_readers(w.down)
    p.moe_gate_up("gate_up", x, w.gate, w.up, offsets=s.offsets, order=s.order, out=products)
    p.moe_down(
        "down",
        products,
        w.down,
        offsets=s.offsets,
        order=s.order,
        ids=s.ids,
        weights=s.weights,
        base=s.delta if w.shared else None,
        out=s.delta,
    )


def exchanged_moe(p: Recorder, c: ModelConfig, s: Scratch, w: LayerWeights, experts: MoeWeights, *, own: Rows) -> None:
    """What `mlp` does, in the rank's own rows: their tokens go to the ranks that have their experts."""
    shared = [experts.shared.gate_up] if experts.shared else []
    x = s.x.for_readers(experts.router, experts.gate, *shared)
    p.reduce_scatter("mlp.reduce", s.delta)
    p.rms_norm("mlp.norm", s.resid, w.mlp_norm, c.rms_norm_eps, delta=s.delta, own=own, out=x)
    grouping = {"offsets": s.offsets, "order": s.order}
    with p.scope("moe"):
        choose(p, c, s, x, experts, own=own)
        hidden = s.expert_hidden.for_readers(experts.down)
        p.moe_gate_up("gate_up", x, experts.gate, experts.up, **grouping, out=hidden)
        p.moe_down_each("down", hidden, experts.down, **grouping, out=s.products)
        base = s.delta if experts.shared else None
        routed = {"ids": s.ids, "weights": s.weights}
        p.moe_combine("combine", s.products, experts.down, **routed, base=base, out=s.delta)


def head(p: Recorder, c: ModelConfig, s: Scratch, w: Weights, layout: Layout, *, spread: Rows | None) -> None:
    """logits = head(norm(resid + delta)) of the sampled rows and this rank's tokens, and the rows' next tokens."""
    resid, delta, forms, own = s.resid, s.delta, s.x, spread
    if p.name == "mixed":
        resid, delta, forms, own = s.last_resid, s.last_delta, s.last_x, None
        if spread:
            p.all_gather("head.all_resid", s.resid)
            p.all_gather("head.all_delta", s.delta)
        p.gather_rows("head.gather_resid", s.resid, out=resid)
        p.gather_rows("head.gather_delta", s.delta, out=delta)
    x = forms.for_readers(w.head)
    reduce = layout.exchanges and spread is None
    p.rms_norm("head.norm", resid, w.norm, c.rms_norm_eps, delta=delta, reduce=reduce, own=own, out=x)
    if own:
        gather_forms(p, "head.gather", x)
    p.linear("head.logits", x, w.head, out=s.logits)
    p.sample("head.sample", s.logits, layout.vocab(c))
