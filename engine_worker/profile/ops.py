"""The time of each op of a step.

On a device with graphs the calls of one name in all layers (`layers.*.attn.qkv`) are recorded one after another and
replayed, so that starting a kernel costs what it costs in a step and each call finds other weights than the one before.
Elsewhere the ops run one by one in the plan's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_worker.plan.cost import OpCost, layer_label, merge_layers, step_cost
from engine_worker.plan.record import Plan
from engine_worker.profile.shape import StepShape, bind, first_batch
from engine_worker.profile.steps import SAMPLING
from engine_worker.runtime.abi import Engine


@dataclass(frozen=True, slots=True)
class OpTime:
    """Of all calls of `cost.label` in a step; `floor_s` is the least that they could take."""

    cost: OpCost
    seconds: float
    floor_s: float

    @property
    def gigabytes_per_s(self) -> float:
        return self.cost.total_bytes / self.seconds / 1e9

    @property
    def gigaflops(self) -> float:
        return self.cost.flops / self.seconds / 1e9

    @property
    def ratio(self) -> float:
        """1 is perfect; more is slower."""
        return self.seconds / self.floor_s if self.floor_s else float("inf")


def profile_ops(
    engine: Engine,
    plan: Plan,
    shape: StepShape,
    floor: Callable[[OpCost], float],
    *,
    every_label: bool = False,
    recorded: bool = False,
    repeats: int = 5,
) -> list[OpTime]:
    """Time the ops of one step, those of all layers together unless `every_label`, each the best of `repeats`.

    `floor` gives the least seconds of an op. `recorded`: the engine's table has graphs.
    """
    costs = step_cost(plan, shape.rows, shape.batch, [shape.context] * shape.batch)
    groups = _groups(plan, every_label)
    bind(engine, shape, SAMPLING)
    batch = first_batch(shape, plan.vocab)
    everything = range(len(plan.ops))
    engine.run_ops(batch, everything)  # kernels are loaded, buffers hold what a step leaves there
    if recorded:

        def run(ops: Sequence[int]) -> float:
            return engine.run_ops(batch, ops, max(2, repeats)).device_ns / 1e9

        seconds = {label: _recorded_seconds(plan, ops, run) for label, ops in groups.items()}
    else:
        best = [float("inf")] * len(plan.ops)
        for _ in range(repeats):
            for op in everything:
                best[op] = min(best[op], engine.run_ops(batch, [op]).device_ns / 1e9)
        seconds = {label: sum(best[op] for op in ops) for label, ops in groups.items()}
    shown = costs if every_label else merge_layers(costs)
    return [OpTime(cost, seconds[cost.label], floor(cost)) for cost in shown]


def _recorded_seconds(plan: Plan, ops: Sequence[int], run: Callable[[Sequence[int]], float]) -> float:
    """Of `ops` one after another. Which experts an op reads is its own layer's choice: it is made anew before each op,
    and its time taken off.
    """
    before = [_routing(plan, op) for op in ops]
    if not any(before):
        return run(ops)
    routing = [place for places in before for place in places]
    everything = [place for places, op in zip(before, ops, strict=True) for place in [*places, op]]
    return max(1e-9, run(everything) - run(routing))


def _routing(plan: Plan, op: int) -> list[int]:
    """The places of the calls that decide what an expert op reads: the last of their kinds before it."""
    deciding = {"moe_group": ["moe_route"], "moe_gate_up": ["moe_route", "moe_group"]}
    deciding["moe_down"] = deciding["moe_gate_up"]
    kinds = deciding.get(plan.ops[op].kind, [])
    return [max(place for place in range(op) if plan.ops[place].kind == kind) for kind in kinds]


def _groups(plan: Plan, every_label: bool) -> dict[str, Sequence[int]]:
    groups: dict[str, list[int]] = {}
    for i, op in enumerate(plan.ops):
        groups.setdefault(op.label if every_label else layer_label(op.label), []).append(i)
    return dict(groups)
