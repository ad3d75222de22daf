"""A step's profile: the step as the worker runs it, and its ops, on an engine made for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_worker.driver.compile import ExecutorSetting, with_executor
from engine_worker.models import Model
from engine_worker.plan.cost import OpCost
from engine_worker.profile.ops import OpTime, profile_ops
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import StepTime, time_steps
from engine_worker.runtime.abi import Engine, Library, kernel_table_path

_STEPS = 10
# Futhark's table exports no reader, and runs on the same card.
_READERS = {"futhark_cuda": "cuda"}


@dataclass(frozen=True, slots=True)
class StepProfile:
    device: str
    bytes_per_s: float  # that it reads at best
    shape: StepShape
    step: StepTime
    ops: list[OpTime]

    @property
    def floor_s(self) -> float:
        return sum(op.floor_s for op in self.ops)

    @property
    def ops_s(self) -> float:
        return sum(op.seconds for op in self.ops)


def profile_step(
    model: Model,
    shape: StepShape,
    table: str,
    *,
    executor: ExecutorSetting = "native",
    device_ordinal: int = 0,
    num_threads: int = 0,
    flops_per_s: float | None = None,
    every_label: bool = False,
) -> StepProfile:
    """Of the model's first rank. `flops_per_s`: of the device; without it floors are those of memory alone.

    Raises WorkerError: the machine, its memory or the checkpoint do not allow it.
    """
    reader = _READERS.get(table, table)
    bytes_per_s = Library().read_bandwidth(kernel_table_path(reader), device_ordinal, num_threads)

    def floor(cost: OpCost) -> float:
        memory_s = cost.total_bytes / bytes_per_s
        return memory_s if flops_per_s is None else max(memory_s, cost.flops / flops_per_s)

    plan = shape.plan(model)
    options = options_for(model, table, [shape], device_ordinal=device_ordinal, num_threads=num_threads)
    with Engine.create(replace(options, ranks=with_executor(options.ranks, executor))) as engine:
        step = time_steps(engine, shape, _STEPS)
        recorded = table == "cuda" and not every_label
        ops = profile_ops(engine, plan, shape, floor, every_label=every_label, recorded=recorded)
        return StepProfile(engine.info().device, bytes_per_s, shape, step, ops)
