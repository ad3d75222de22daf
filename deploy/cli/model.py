"""`glm model fetch`, `glm model inspect`."""

from typing import Annotated

import typer

from deploy.cli.console import model_directory, progress_bar, worker_errors
from deploy.models.catalog import CATALOG, DEFAULT_MODEL

app = typer.Typer(help="Fetch models, and look into checkpoints.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(sorted(CATALOG))}.")] = DEFAULT_MODEL,
) -> None:
    """Fetch a model into the cache directory, if it is not there, and print where it is."""
    from deploy.models.fetch import fetch as fetch_model  # noqa: PLC0415

    with progress_bar() as report:
        directory = fetch_model(name, progress=report)
    print(directory)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="DIR|NAME", help="A checkpoint directory or a known model.")],
) -> None:
    """List every tensor: name, dtype, shape, bytes, shard."""
    from engine_worker.weights.safetensors_index import read_checkpoint  # noqa: PLC0415

    with worker_errors():
        tensors = read_checkpoint(model_directory(model)).tensors.values()
    rows = [
        (
            tensor.name,
            tensor.dtype,
            str(list(tensor.shape)),
            str(tensor.nbytes),
            tensor.path.name if tensor.path else "",
        )
        for tensor in tensors
    ]
    header = ("name", "dtype", "shape", "bytes", "shard")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())
    print(f"{len(rows)} tensors, {sum(tensor.nbytes for tensor in tensors)} bytes")
