"""`glm plan parity`: the debugger for a new kernel."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.console import model_directory, worker_errors
from deploy.cli.options import ModelOption
from deploy.cli.plan import GpuOption, KvDtype, KvDtypeOption, Weights, WeightsOption, aligned
from deploy.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from engine_worker.parity.lockstep import OpError


class Kernels(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    FUTHARK = "futhark"
    FUTHARK_CUDA = "futhark_cuda"
    FUTHARK_HIP = "futhark_hip"
    FUTHARK_OPENCL = "futhark_opencl"


def parity(
    *,
    model: ModelOption = DEFAULT_MODEL,
    weights: WeightsOption = Weights.CHECKPOINT,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    kernels: Annotated[Kernels, typer.Option(help="The table to test.")] = Kernels.CUDA,
    against: Annotated[Kernels, typer.Option(help="The table that is right.")] = Kernels.CPU,
    gpu: GpuOption = 0,
    sequences: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="That run together.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of the longest one.")] = 40,
    steps: Annotated[int, typer.Option(min=0, metavar="N", help="Decode steps after the prompts.")] = 4,
) -> None:
    """Run the same steps on two kernel tables, op by op, and stop at the first op that differs.

    After each op the tested table goes on with the other's results, so that each op is judged by itself.
    """
    from engine_worker.device import on_gpu  # noqa: PLC0415
    from engine_worker.models import build_model  # noqa: PLC0415
    from engine_worker.parity.run import Table, random_prompts, run_parity, worst_of_each_kind  # noqa: PLC0415
    from engine_worker.runtime.abi import kernel_table_path  # noqa: PLC0415

    def table(name: Kernels) -> Table:
        return Table(kernel_table_path(name.value), gpu if on_gpu(name.value) else 0)

    directory = model_directory(model)
    with worker_errors():
        built = build_model(directory, kv_dtype.value, synthetic_seed=weights.seed)
        prompts = random_prompts(sequences, prompt_tokens, built.config.vocab_size)
        found = list(run_parity(built, table(against), table(kernels), prompts, steps))
    for line in aligned([("op", "worst at", "output", "error"), *(_row(error) for error in worst_of_each_kind(found))]):
        print(line)
    print(f"{kernels.value} agrees with {against.value}: {1 + steps} steps, {len(found)} outputs")


def _row(found: "OpError") -> tuple[str, ...]:
    return (found.kind, f"step {found.step} {found.label}", found.difference.key, f"{found.difference.error:.2g}")
