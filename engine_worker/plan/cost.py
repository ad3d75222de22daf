"""What a step must at least move and compute, op by op, from the plan alone: the roofline (Williams et al. 2009).

Each weight, activation and cached key counts once per op that reads or writes it. FLOPs are those of matrix products
and attention, a multiply-add as two; element-wise work counts as none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from engine_worker.plan.record import DTYPE_BYTES, SAMPLES, TOKENS, Buffer, Op, Plan, Size
from engine_worker.weights.records import Experts, Matrix, Vector, Weight, WeightFormat, blocks

F32_BYTES = 4  # vectors, scales and biases are held as f32


@dataclass(frozen=True, slots=True)
class OpCost:
    """Bytes and FLOPs of `calls` calls. Not whole numbers where they rest on an expected number of experts."""

    label: str
    kind: str
    calls: int
    weight_bytes: float
    activation_bytes: float
    kv_bytes: float
    flops: float

    @property
    def total_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class _Step:
    plan: Plan
    tokens: int
    samples: int
    keys_read: int  # over all sequences
    keys_scored: int  # over all rows
    touched_experts: float | None
    routed_experts: int  # of the whole model: this rank's are those of its experts' weights

    def rows(self, op: Op) -> int:
        return op.rows.count(self.tokens, self.samples)


def step_cost(
    plan: Plan, tokens: int, samples: int, contexts: Sequence[int], touched_experts: float | None = None
) -> list[OpCost]:
    """The cost of each op in a step of `tokens` rows, `samples` of them sampled.

    `contexts` holds each sequence's length after the step; the rows are spread evenly over the sequences. An expert
    layer reads `touched_experts` experts, or else the number expected of a uniform choice. Raises ValueError if the
    rows do not fit the sequences.
    """
    news = _spread(tokens, len(contexts))
    for new, context in zip(news, contexts, strict=True):
        if new > context:
            raise ValueError(
                f"contexts: {context}, expected at least the {new} tokens that the step adds to the sequence"
            )
    if not 0 <= samples <= tokens:
        raise ValueError(f"samples: {samples}, expected 0 to tokens = {tokens}")
    # Row j of `new` rows, the last of which sees `context` keys, sees context - new + 1 + j of them.
    scored = sum(new * context - new * (new - 1) // 2 for new, context in zip(news, contexts, strict=True))
    step = _Step(plan, tokens, samples, sum(contexts), scored, touched_experts, _routed_experts(plan))
    return [_op_cost(step, op) for op in plan.ops]


def expected_experts(experts: int, top_k: int, tokens: int, local: int | None = None) -> float:
    """How many of `local` ones (unset: of all) are chosen at least once when each token chooses `top_k` of `experts`
    uniformly."""
    return (experts if local is None else local) * (1 - (1 - top_k / experts) ** tokens)


def held_bytes(weight: Weight) -> int:
    """All of a weight, as it is loaded: with its scales and biases, vectors as f32."""
    if isinstance(weight, Vector):
        return F32_BYTES * weight.size
    if isinstance(weight, Experts):
        return weight.count * _matrix_bytes(weight.format, weight.rows, weight.cols)
    biases = sum(F32_BYTES * (part.rows[1] - part.rows[0]) for part in weight.parts if part.bias)
    return biases + sum(_matrix_bytes(weight.format, part.rows[1] - part.rows[0], weight.cols) for part in weight.parts)


def layer_label(label: str) -> str:
    """The name that an op has in every layer: `layers.*.attn.qkv`."""
    return re.sub(r"^layers\.\d+\.", "layers.*.", label)


def merge_layers(costs: Iterable[OpCost]) -> list[OpCost]:
    """One row for each op of a layer (`layers.*.attn.qkv`), in order of first call."""
    merged: dict[str, OpCost] = {}
    for cost in costs:
        label = layer_label(cost.label)
        before = merged.get(label)
        merged[label] = replace(cost, label=label) if before is None else _sum(label, cost.kind, [before, cost])
    return list(merged.values())


def total(costs: Iterable[OpCost]) -> OpCost:
    """The whole step."""
    return _sum("total", "step", list(costs))


def floor_seconds(costs: Iterable[OpCost], bytes_per_second: float, flops_per_second: float) -> float:
    """The least time for ops that run one after another, each bound by memory or by arithmetic."""
    return sum(max(cost.total_bytes / bytes_per_second, cost.flops / flops_per_second) for cost in costs)


def _sum(label: str, kind: str, costs: Sequence[OpCost]) -> OpCost:
    return OpCost(
        label,
        kind,
        sum(cost.calls for cost in costs),
        sum(cost.weight_bytes for cost in costs),
        sum(cost.activation_bytes for cost in costs),
        sum(cost.kv_bytes for cost in costs),
        sum(cost.flops for cost in costs),
    )


def _spread(tokens: int, sequences: int) -> list[int]:
    if tokens < sequences or (sequences == 0 and tokens > 0):
        raise ValueError(f"tokens: {tokens}, expected at least one for each of {sequences} sequences")
    return [tokens // sequences + (i < tokens % sequences) for i in range(sequences)]


def _op_cost(step: _Step, op: Op) -> OpCost:
    weights = [value for value in op.args.values() if isinstance(value, Weight)]
    flops = _FLOPS.get(op.kind)
    return OpCost(
        label=op.label,
        kind=op.kind,
        calls=1,
        weight_bytes=sum(_weight_bytes(step, op, weight) for weight in weights),
        activation_bytes=_activation_bytes(step, op),
        kv_bytes=_kv_bytes(step, op),
        flops=flops(step, op) if flops else 0,
    )


def _weight_bytes(step: _Step, op: Op, weight: Weight) -> float:
    if isinstance(weight, Experts):
        return _touched(step, op, weight) * _matrix_bytes(weight.format, weight.rows, weight.cols)
    if isinstance(weight, Matrix) and op.kind == "embed":
        return step.rows(op) * weight.cols * weight.format.element_bytes
    return held_bytes(weight)


def _touched(step: _Step, op: Op, experts: Experts) -> float:
    if step.touched_experts is not None:
        return step.touched_experts
    return expected_experts(step.routed_experts, _integer(op, "top_k"), step.rows(op), experts.count)


def _matrix_bytes(weight_format: WeightFormat, rows: int, cols: int) -> int:
    scales = {WeightFormat.FP8_CHANNEL: rows, WeightFormat.FP8_BLOCK: blocks(rows) * blocks(cols)}
    return rows * cols * weight_format.element_bytes + F32_BYTES * scales.get(weight_format, 0)


def _routed_experts(plan: Plan) -> int:
    routers = [op.args["w"] for op in plan.ops if op.kind == "moe_route"]
    return max((router.rows for router in routers if isinstance(router, Matrix)), default=0)


def _local_share(step: _Step, op: Op) -> float:
    """Of the assignments to experts: those expected for the experts of this rank."""
    counts = [value.count for value in op.args.values() if isinstance(value, Experts)]
    return counts[0] / step.routed_experts if counts else 1


def _activation_bytes(step: _Step, op: Op) -> float:
    total_bytes: float = 0
    for key, value in op.args.items():
        if isinstance(value, Buffer):
            rows = SAMPLES if op.kind == "gather_rows" else value.rows
            if op.rows.size is Size.OWN and rows == TOKENS:
                rows = op.rows
            in_place = (key == "residual" and "delta" in op.args) or op.kind in _IN_PLACE
            share = _local_share(step, op) if rows.factor > 1 else 1
            count = share * rows.count(step.tokens, step.samples)
            total_bytes += (2 if in_place else 1) * count * value.cols * DTYPE_BYTES[value.dtype]
    return total_bytes


def _kv_bytes(step: _Step, op: Op) -> int:
    kv = step.plan.kv
    token_bytes = 2 * kv.kv_heads * kv.head_dim * DTYPE_BYTES[kv.dtype]
    return token_bytes * {"qk_norm_rope_store": step.tokens, "paged_attention": step.keys_read}.get(op.kind, 0)


def _integer(op: Op, key: str) -> int:
    value = op.args[key]
    assert isinstance(value, int), f"{op.label}: {key} is {value}"
    return value


def _product_flops(step: _Step, op: Op) -> float:
    """Each row meets every element of the op's matrices; each assignment every element of its expert."""
    matrices = [value for value in op.args.values() if isinstance(value, Matrix | Experts)]
    top_k = _integer(op, "top_k") * _local_share(step, op) if isinstance(matrices[0], Experts) else 1
    passes = step.rows(op) * top_k
    return 2 * passes * sum(matrix.rows * matrix.cols for matrix in matrices)


def _attention_flops(step: _Step, op: Op) -> int:
    return 4 * _integer(op, "heads") * step.plan.kv.head_dim * step.keys_scored


_IN_PLACE = ("all_reduce", "reduce_scatter", "all_gather", "moe_dispatch")
_FLOPS: MappingProxyType[str, Callable[[_Step, Op], float]] = MappingProxyType(
    {
        "linear": _product_flops,
        "moe_route": _product_flops,
        "moe_gate_up": _product_flops,
        "moe_down": _product_flops,
        "moe_down_each": _product_flops,
        "paged_attention": _attention_flops,
    }
)
