"""Where messages go, and how long work is shown."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deploy.errors import ModelError
from deploy.models.catalog import resolve_model
from deploy.models.progress import Progress as Report

# Results go to stdout, everything said about them here.
messages = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Yield a callback that moves a bar: it appears with the first call and vanishes when the work is done."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal)
    task = bar.add_task("", total=None)

    def report(stage: str, done: int, total: int) -> None:
        bar.start()
        bar.update(task, description=stage, completed=done, total=total or None)

    try:
        yield report
    finally:
        bar.stop()


def model_directory(name_or_dir: str) -> Path:
    """Resolve `--model`, showing progress while a model is fetched."""
    with progress_bar() as report:
        return resolve_model(name_or_dir, report)


@contextmanager
def worker_errors() -> Iterator[None]:
    """WorkerError becomes ModelError: what is wrong is the model, or what was asked of it."""
    from engine_worker.errors import WorkerError  # noqa: PLC0415

    try:
        yield
    except WorkerError as error:
        raise ModelError(str(error)) from None
