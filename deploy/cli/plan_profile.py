"""`glm plan profile`."""

import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.console import model_directory, worker_errors
from deploy.cli.options import Executor, Kernels, ModelOption
from deploy.cli.plan import GpuOption, KvDtype, KvDtypeOption, Weights, WeightsOption, aligned
from deploy.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from engine_worker.profile.ops import OpTime
    from engine_worker.profile.report import StepProfile


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def profile(
    *,
    model: ModelOption = DEFAULT_MODEL,
    weights: WeightsOption = Weights.CHECKPOINT,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    device: Annotated[Device, typer.Option(help="auto: a GPU if one answers.")] = Device.AUTO,
    gpu: GpuOption = 0,
    kernels: Annotated[Kernels, typer.Option(help="futhark: the portable table.")] = Kernels.NATIVE,
    executor: Annotated[Executor, typer.Option(help="Of whole steps; ops one by one are native's.")] = Executor.NATIVE,
    threads: Annotated[int, typer.Option(min=0, metavar="N", help="Of the CPU kernels; 0: one for each core.")] = 0,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences in the step.")] = 1,
    context: Annotated[int, typer.Option(min=1, metavar="L", help="Length of each sequence after the step.")] = 512,
    prefill: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compute the last N tokens of each, not one by decode.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, metavar="N", help="Profile the first rank of N, without exchanges.")] = 1,
    gflops: Annotated[
        float | None, typer.Option(min=1, metavar="G", help="GFLOP/s of the device; without, floors are of memory.")
    ] = None,
    every_label: Annotated[bool, typer.Option("--every-label", help="A row for each call, not for each name.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time each op of a step beside the least that it could take.

    The keys and values of earlier tokens are made up: nothing is prefilled. The floor of an op is the time of its
    bytes at the bandwidth at which the device reads memory, or that of its arithmetic at --gflops.
    """
    if prefill is not None and prefill > context:
        raise typer.BadParameter(f"at most --context, which is {context}", param_hint="--prefill")
    from engine_worker.device import choose_device, on_gpu  # noqa: PLC0415
    from engine_worker.models import Parallelism, build_model  # noqa: PLC0415
    from engine_worker.profile.report import profile_step  # noqa: PLC0415
    from engine_worker.profile.shape import StepShape  # noqa: PLC0415

    directory = model_directory(model)
    shape = StepShape(batch, context, prefill or 1, decode=prefill is None)
    slice_of = Parallelism(tp=tp, rank_slice=0 if tp > 1 else None)
    with worker_errors():
        table = choose_device(device.value, gpu, kernels.value).table
        built = build_model(directory, kv_dtype.value, slice_of, weights.seed)
        found = profile_step(
            built,
            shape,
            table,
            executor=executor.value,
            device_ordinal=gpu if on_gpu(table) else 0,
            num_threads=threads,
            flops_per_s=None if gflops is None else gflops * 1e9,
            every_label=every_label,
        )
    if as_json:
        json.dump(as_record(found), sys.stdout, indent=2)
        print()
    else:
        print_profile(found)


def print_profile(found: "StepProfile") -> None:
    """For people."""
    shape, step = found.shape, found.step
    print(
        f"{found.device}, reads {found.bytes_per_s / 1e9:.1f} GB/s: {shape.batch} sequences of {shape.context} tokens, "
        f"{shape.rows} rows"
    )
    ratio = step.device_s / found.floor_s
    print(
        f"step {step.device_s * 1e3:.3f} ms, floor {found.floor_s * 1e3:.3f} ms, ratio {ratio:.2f}; "
        f"{step.gap_s * 1e6:.0f} us to the next step; ops add up to {found.ops_s * 1e3:.3f} ms"
    )
    header = ("op", "kind", "calls", "us", "us a call", "MB", "GFLOP", "GB/s", "GFLOP/s", "x floor", "share")
    for line in aligned([header, *(_row(op, found.ops_s) for op in found.ops)]):
        print(line)


def _row(op: "OpTime", all_s: float) -> tuple[str, ...]:
    cost = op.cost
    return (
        *(cost.label, cost.kind, str(cost.calls), f"{op.seconds * 1e6:.1f}", f"{op.seconds * 1e6 / cost.calls:.2f}"),
        *(f"{cost.total_bytes / 1e6:.3f}", f"{cost.flops / 1e9:.4f}", f"{op.gigabytes_per_s:.1f}"),
        *(f"{op.gigaflops:.1f}", f"{op.ratio:.2f}", f"{100 * op.seconds / all_s:.1f}%"),
    )


def as_record(found: "StepProfile") -> dict[str, Any]:
    """What --json prints: seconds, bytes and FLOPs."""
    return {
        "device": found.device,
        "read_bytes_per_s": found.bytes_per_s,
        "batch": found.shape.batch,
        "context": found.shape.context,
        "rows": found.shape.rows,
        "plan": "decode" if found.shape.decode else "mixed",
        "step_s": found.step.device_s,
        "wall_s": found.step.wall_s,
        "gap_s": found.step.gap_s,
        "floor_s": found.floor_s,
        "ops_s": found.ops_s,
        "ops": [
            {
                "op": op.cost.label,
                "kind": op.cost.kind,
                "calls": op.cost.calls,
                "seconds": op.seconds,
                "floor_s": op.floor_s,
                "bytes": op.cost.total_bytes,
                "flops": op.cost.flops,
                "bytes_per_s": op.gigabytes_per_s * 1e9,
                "flops_per_s": op.gigaflops * 1e9,
                "share": op.seconds / found.ops_s,
            }
            for op in found.ops
        ],
    }
