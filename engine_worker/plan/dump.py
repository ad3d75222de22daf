"""The plan text of native/PLAN.md, the one form in which a plan leaves this process. Equal plans give equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from engine_worker.plan.record import Op, Plan, Rows, Size, Value
from engine_worker.weights.records import Matrix, Part, Span, Vector, Weight

VERSION = 1


def dump(plan: Plan) -> str:
    """The plan as text, ending in a newline."""
    return "\n".join(_lines(plan)) + "\n"


def plan_hash(plan: Plan) -> str:
    """SHA-256 of the text, in hex: equal plans, and only they, have equal hashes."""
    return hashlib.sha256(dump(plan).encode()).hexdigest()


def _lines(plan: Plan) -> Iterator[str]:
    yield f"glmplan {VERSION}"
    yield f"name {plan.name}"
    yield " ".join(["meta", *(f"{key}={value}" for key, value in plan.meta.items())])
    yield f"act {plan.act}"
    yield f"vocab {plan.vocab}"
    kv = plan.kv
    yield f"kv layers={kv.layers} kv_heads={kv.kv_heads} head_dim={kv.head_dim} dtype={kv.dtype}"
    for rope in plan.ropes:
        yield f"rope {rope.name} rotary_dim={rope.rotary_dim} theta={_number(rope.theta)}"
    for buffer in plan.buffers:
        yield f"buffer {buffer.name} {buffer.dtype} {_rows(buffer.rows)} {buffer.cols}"
    for placement in plan.placements:
        yield f"placement {placement.name} {len(placement.experts)} experts={','.join(map(str, placement.experts))}"
    for weight in plan.weights:
        yield from _weight_lines(weight)
    for op in plan.ops:
        yield _op_line(op)


def _weight_lines(weight: Weight) -> Iterator[str]:
    if isinstance(weight, Vector):
        yield f"vector {weight.name} {weight.size} tensor={weight.tensor}"
    elif isinstance(weight, Matrix):
        yield f"matrix {weight.name} {weight.format.value} {weight.rows} {weight.cols}"
        for part in weight.parts:
            yield _part_line(part)
    else:
        scale = [f"scale={weight.scale}"] if weight.scale else []
        fields = [
            *("experts", weight.name, weight.format.value, f"{weight.count} {weight.rows} {weight.cols}"),
            f"first={weight.first}",
            f"rows={_span((weight.row, weight.row + weight.rows))}",
            f"cols={_span((weight.col, weight.col + weight.cols))}",
            *(f"tensor={weight.tensor}", *scale),
            *([f"placement={weight.placement.name}"] if weight.placement else []),
        ]
        yield " ".join(fields)


def _part_line(part: Part) -> str:
    fields = ["part", f"tensor={part.tensor}", f"rows={_span(part.rows)}", f"cols={_span(part.cols)}"]
    if part.scale:
        fields.append(f"scale={part.scale}")
    if part.bias:
        fields.append(f"bias={part.bias}")
    return " ".join(fields)


def _op_line(op: Op) -> str:
    return " ".join(["op", op.kind, op.label, *(f"{key}={_value(value)}" for key, value in op.args.items())])


def _value(value: Value) -> str:
    if isinstance(value, Rows):
        return _rows(value)
    return _number(value) if isinstance(value, int | float) else value.name


def _rows(rows: Rows) -> str:
    if rows.size is Size.ONE:
        return str(rows.factor)
    return rows.size.value if rows.factor == 1 or rows.size is Size.OWN else f"{rows.factor}*{rows.size.value}"


def _span(span: Span) -> str:
    return f"{span[0]}:{span[1]}"


def _number(value: float) -> str:
    """The shortest text that reads back as the same number."""
    return repr(value).removesuffix(".0")
