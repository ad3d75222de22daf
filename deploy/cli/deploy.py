"""`glm deploy`: the steps that bring a model into service, each by itself; deploy/modal_app.py runs the same."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.console import messages, progress_bar
from deploy.cli.options import EpOption, TargetOption, TpOption, rank_args
from deploy.cli.plan import KvDtype, KvDtypeOption
from deploy.local import local_cluster
from deploy.models.catalog import DEFAULT_MODEL

app = typer.Typer(help="Bring a model into service, step by step.", no_args_is_help=True, rich_markup_mode=None)

VolumeOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Where checkpoints (models/NAME) and reports (reports/) are kept.")
]
NameOption = Annotated[
    str, typer.Option("--model", metavar="NAME", help="Directory of the checkpoint under models/ of the volume.")
]


@app.command()
def download(
    *,
    source: Annotated[
        str, typer.Option("--model", metavar="NAME|ORG/NAME", help="An embedded model, or a repository of the hub.")
    ] = DEFAULT_MODEL,
    volume: VolumeOption,
    revision: Annotated[str, typer.Option(metavar="REV", help="Branch, tag or commit of the repository.")] = "main",
) -> None:
    """Fetch a checkpoint, going on where an earlier try ended, verify every file, and print where it is."""
    from deploy.steps.download import download as run  # noqa: PLC0415

    with progress_bar() as report:
        print(run(source, volume, revision, report))


@app.command()
def validate(
    *,
    model: NameOption = DEFAULT_MODEL,
    volume: VolumeOption,
    tp: TpOption = 1,
    ep: EpOption = None,
    kv_dtype: KvDtypeOption = KvDtype.AUTO,
    sequences: Annotated[int, typer.Option(min=1, metavar="N", help="Sequences to have KV pages for.")] = 64,
    context: Annotated[int, typer.Option(min=1, metavar="L", help="Tokens of each of them.")] = 4096,
) -> None:
    """Hold a checkpoint's headers against what the model needs, without reading a weight; memory of each rank."""
    from deploy.steps.validate import Serving  # noqa: PLC0415
    from deploy.steps.validate import validate as run  # noqa: PLC0415

    serving = Serving(tp or 1, ep, kv_dtype.value, sequences, context)
    _report(volume, "validate", model, run(checkpoint(volume, model), serving))


@app.command()
def smoke(*, model: NameOption = DEFAULT_MODEL, volume: VolumeOption, tp: TpOption = None, ep: EpOption = None) -> None:
    """Start worker and router, ask for the capital of France, and fail if the answer lacks it."""
    from deploy.steps.smoke import smoke as run  # noqa: PLC0415

    with progress_bar() as report:
        result = run(checkpoint(volume, model), rank_args(tp, ep), progress=report)
    _report(volume, "smoke", model, result)


@app.command()
def benchmark(
    *,
    model: NameOption = DEFAULT_MODEL,
    volume: VolumeOption,
    tp: TpOption = None,
    ep: EpOption = None,
    target: TargetOption = None,
    prefill: Annotated[str, typer.Option(metavar="N,N", help="Prompt lengths.")] = "128,1024,4080",
    batch: Annotated[str, typer.Option(metavar="N,N", help="Sequences decoded at once.")] = "1,4,16,64",
    context: Annotated[int, typer.Option(min=1, metavar="L", help="Prompt tokens of each decoded sequence.")] = 1024,
    output_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of each decoded sequence.")] = 128,
) -> None:
    """Measure prefill and decode, each by itself, and write figures and plots into the volume."""
    import uvloop  # noqa: PLC0415 - gRPC is slow to import

    from deploy.steps.benchmark import Cases, draw_scaling, pair_for  # noqa: PLC0415
    from deploy.steps.benchmark import benchmark as run  # noqa: PLC0415

    cases = Cases(_numbers("--prefill", prefill), _numbers("--batch", batch), context, output_tokens)
    with progress_bar() as report:
        if target is not None:
            result = uvloop.run(run(target, cases, report))
        else:
            options = pair_for(checkpoint(volume, model), cases, rank_args(tp, ep))
            with local_cluster(options, lambda state: report(state, 0, 0)) as cluster:
                result = uvloop.run(run(cluster.router, cases, report))
    _report(volume, "benchmark", model, result)
    for path in draw_scaling(result, reports(volume, model)):
        messages.print(f"written {path}", markup=False)


def checkpoint(volume: Path, model: str) -> Path:
    """Where `download` put it. BadParameter: it did not."""
    directory = volume / "models" / model
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory} is not there; `glm deploy download` first", param_hint="--model")
    return directory


def reports(volume: Path, model: str) -> Path:
    """What the steps found of a model."""
    return volume / "reports" / model


def _report(volume: Path, step: str, model: str, result: dict[str, Any]) -> None:
    directory = reports(volume, model)
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (directory / f"{step}.json").write_text(text + "\n")
    print(text)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list like 1,4,16", param_hint=flag) from None
    if min(numbers) < 1:
        raise typer.BadParameter(f"{min(numbers)} is not allowed; allowed: 1 and more", param_hint=flag)
    return numbers
