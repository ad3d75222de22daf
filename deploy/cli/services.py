"""`glm serve`, `glm router`, `glm worker`."""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from deploy.cli.console import messages, model_directory
from deploy.cli.options import EpOption, ExecutorOption, KernelsOption, ModelOption, TpOption, rank_args
from deploy.models.catalog import DEFAULT_MODEL

# The services have settings of their own, with their own --help.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(
    *,
    model: ModelOption = DEFAULT_MODEL,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the router listens; port 0 is any free one.")
    ] = "127.0.0.1:0",
    http_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where it serves the OpenAI and Anthropic APIs and the chat page; without it, as --router-config "
            "says, or on any free port of loopback.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="How many workers.")] = 1,
    tp: TpOption = None,
    ep: EpOption = None,
    executor: ExecutorOption = None,
    kernels: KernelsOption = None,
    worker_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The workers' settings (see `glm worker --help`).")
    ] = None,
    router_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The router's settings (see `glm router --help`).")
    ] = None,
) -> None:
    """Run workers and a router on this machine until Ctrl-C."""
    from deploy.local import ANY_PORT, LocalOptions, local_cluster  # noqa: PLC0415 - gRPC is slow to import

    if http_listen is None and router_config is None:
        http_listen = ANY_PORT
    options = LocalOptions(
        model=model_directory(model),
        listen=listen,
        workers=workers,
        worker_args=[
            *rank_args(tp, ep, executor, kernels),
            *(["--config", str(worker_config)] if worker_config else []),
        ],
        router_args=[
            *(["--http-listen", http_listen] if http_listen else []),
            *(["--config", str(router_config)] if router_config else []),
        ],
        echo=True,
    )
    try:
        with local_cluster(options, messages.print) as cluster:
            http = [] if cluster.http is None else [f"http {cluster.http}"]
            lines = [f"router {cluster.router}", *http, *(f"worker {worker}" for worker in cluster.workers)]
            print(*lines, sep="\n", flush=True)
            page = "" if cluster.http is None else f"; the chat page is at {cluster.http}"
            messages.print(f"serving{page}; Ctrl-C stops all")
            cluster.watch()
    except KeyboardInterrupt:
        messages.print("stopped")


def router(ctx: typer.Context) -> None:
    """Run a router. `glm router --help` lists its settings."""
    _become("router", ctx.args)


def worker(ctx: typer.Context) -> None:
    """Run an engine worker. `glm worker --help` lists its settings."""
    _become("engine_worker", ctx.args)


def _become(module: str, args: list[str]) -> NoReturn:
    """Replace this process, so that signals and the exit status are the service's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *resolved(args)])  # noqa: S606


def resolved(args: list[str]) -> list[str]:
    """The service's flags with a model's name replaced by its directory: services know directories only."""
    done = list(args)
    for index, arg in enumerate(args):
        if arg == "--model" and index + 1 < len(args):
            done[index + 1] = str(model_directory(args[index + 1]))
        elif arg.startswith("--model="):
            done[index] = f"--model={model_directory(arg.removeprefix('--model='))}"
    return done
