"""`glm plan dump`, `glm plan cost`; plan_profile.py has `glm plan profile`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.console import model_directory, worker_errors
from deploy.cli.options import ModelOption
from deploy.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from engine_worker.models import RankPlans
    from engine_worker.plan.cost import OpCost
    from engine_worker.plan.record import Plan

app = typer.Typer(help="Show what a step does and costs.", no_args_is_help=True, rich_markup_mode=None)


class Step(StrEnum):
    MIXED = "mixed"
    DECODE = "decode"


class Weights(StrEnum):
    CHECKPOINT = "checkpoint"
    SYNTHETIC = "synthetic"

    @property
    def seed(self) -> int | None:
        """See build_model."""
        return 0 if self is Weights.SYNTHETIC else None


class Device(StrEnum):
    H100 = "h100"
    H200 = "h200"
    B200 = "b200"


class KvDtype(StrEnum):
    AUTO = "auto"
    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"


StepOption = Annotated[Step, typer.Option(help="Prefill, alone or beside decodes; or decode alone.")]
KvDtypeOption = Annotated[KvDtype, typer.Option(help="Of cached K and V; auto is the activations' dtype.")]
WeightsOption = Annotated[Weights, typer.Option(help="synthetic: made up, so that only config.json is read.")]
GpuOption = Annotated[int, typer.Option(min=0, metavar="N", help="Index of the GPU.")]
TpOption = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Ranks: tensor parallelism.")]
EpOption = Annotated[
    int | None,
    typer.Option(min=1, max=64, metavar="N", help="Groups of ranks that experts are divided among; unset: cut least."),
]
RankOption = Annotated[int, typer.Option(min=0, max=63, metavar="R", help="The rank whose plan it is.")]


@app.command()
def dump(
    *,
    model: ModelOption = DEFAULT_MODEL,
    step: StepOption = Step.DECODE,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    tp: TpOption = 1,
    ep: EpOption = None,
    rank: RankOption = 0,
) -> None:
    """Print a rank's plan in the form that native/PLAN.md describes."""
    from engine_worker.plan.dump import dump as plan_text  # noqa: PLC0415

    print(plan_text(load_plan(model, step, kv_dtype, tp=tp, ep=ep, rank=rank)), end="")


@app.command()
def cost(
    *,
    model: ModelOption = DEFAULT_MODEL,
    step: StepOption = Step.DECODE,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    weights: WeightsOption = Weights.CHECKPOINT,
    tp: TpOption = 1,
    ep: EpOption = None,
    rank: RankOption = 0,
    gpus: Annotated[int | None, typer.Option(min=1, max=64, metavar="N", help="Short for --tp N --ep N.")] = None,
    device: Annotated[
        Device | None, typer.Option(help="Add what a decode step should take on such GPUs, and what fits them.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences in the step.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="New tokens of each sequence; decode has 1.")] = 1,
    context: Annotated[int, typer.Option(min=1, metavar="L", help="Length of each sequence after the step.")] = 512,
) -> None:
    """Print the bytes and FLOPs of each op of a rank's step: what the roofline is made of."""
    if gpus is not None:
        tp, ep = gpus, gpus
    if device is not None and step is not Step.DECODE:
        raise typer.BadParameter("only of a decode step", param_hint="--device")
    if step is Step.DECODE and tokens != 1:
        raise typer.BadParameter("a decode step has 1", param_hint="--tokens")
    if tokens > context:
        raise typer.BadParameter(f"at most --context, which is {context}", param_hint="--tokens")
    from engine_worker.plan.cost import merge_layers, step_cost, total  # noqa: PLC0415

    plans = load_plans(model, kv_dtype, weights, tp=tp, ep=ep, rank=rank)
    plan = plans.mixed if step is Step.MIXED else plans.decode
    costs = step_cost(plan, batch * tokens, batch, [context] * batch)
    for line in cost_table([*merge_layers(costs), total(costs)]):
        print(line)
    if device is not None:
        _print_capacity(plans, device, tp, batch, context)


def _print_capacity(plans: "RankPlans", device: Device, ranks: int, batch: int, context: int) -> None:
    from deploy.capacity import GPUS, capacity  # noqa: PLC0415

    try:
        found = capacity(plans, GPUS[device.value], batch=batch, context=context)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--batch / --context") from None
    print(f"\n{ranks} x {device.value}, decode of {batch} sequences of {context} tokens:")
    print(f"memory of a rank   {found.weights / 1e9:.1f} GB of weights, {found.buffers / 1e9:.2f} GB of buffers")
    print(f"K and V            {found.kv_tokens} tokens fit, {found.kv_tokens // context} sequences of this length")
    print(f"step               at least {found.floor_s * 1e3:.2f} ms a rank; expected {found.step_s * 1e3:.2f} ms,")
    print(f"                   of which {found.sums_s * 1e3:.2f} ms for sums over the ranks")
    print(f"expected           {found.tokens_per_s:.0f} tokens/s (by runs on one and two H200, see BENCHMARKS.md)")


def load_plan(model: str, step: Step, kv_dtype: KvDtype, *, tp: int, ep: int | None, rank: int) -> "Plan":
    """Record the plan of a checkpoint; ModelError if it cannot be served, or not by these ranks."""
    plans = load_plans(model, kv_dtype, Weights.CHECKPOINT, tp=tp, ep=ep, rank=rank)
    return plans.mixed if step is Step.MIXED else plans.decode


def load_plans(model: str, kv_dtype: KvDtype, weights: Weights, *, tp: int, ep: int | None, rank: int) -> "RankPlans":
    """Both plans of a rank. Raises as load_plan does."""
    if rank >= tp:
        raise typer.BadParameter(f"below --tp, which is {tp}", param_hint="--rank")
    from engine_worker.models import Parallelism, build_model  # noqa: PLC0415

    with worker_errors():
        built = build_model(model_directory(model), kv_dtype.value, Parallelism(tp, ep), weights.seed)
    return built.ranks[rank]


def cost_table(costs: "list[OpCost]") -> list[str]:
    """Aligned columns; the last entry is the total, of which `share` is each op's part of the bytes."""
    header = ("op", "kind", "calls", "weights MB", "activations MB", "KV MB", "GFLOP", "share")
    rows = [header, *(_cost_row(entry, costs[-1].total_bytes) for entry in costs)]
    return aligned(rows)


def aligned(rows: "list[tuple[str, ...]]") -> list[str]:
    """Columns, the first two of which are text."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = 2
    return [
        "  ".join(
            value.ljust(width) if column < left else value.rjust(width)
            for column, (value, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _cost_row(entry: "OpCost", all_bytes: float) -> tuple[str, ...]:
    megabytes = (f"{part / 1e6:.3f}" for part in (entry.weight_bytes, entry.activation_bytes, entry.kv_bytes))
    share = f"{100 * entry.total_bytes / all_bytes:.1f}%"
    return (entry.label, entry.kind, str(entry.calls), *megabytes, f"{entry.flops / 1e9:.4f}", share)
