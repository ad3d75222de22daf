"""`glm top`: what workers and routers are doing now."""

import json
import time
from typing import Annotated

import typer


def top(
    *,
    worker: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="An engine worker; may be repeated.")
    ] = None,
    router: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="A router's --metrics-listen; may be repeated.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, metavar="S", help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Show load and rates until Ctrl-C. Rates are over the last interval."""
    if not worker and not router:
        raise typer.BadParameter("give at least one", param_hint="--worker / --router")
    if as_json and not once:
        raise typer.BadParameter("needs --once", param_hint="--json")

    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415 - gRPC and rich.live are slow to import

    from deploy.cli.top_view import as_object, render  # noqa: PLC0415
    from deploy.watch import Watch  # noqa: PLC0415

    results = Console(highlight=False)
    with Watch(worker or (), router or ()) as watch:
        watch.look()
        time.sleep(interval)
        watch.look()
        if as_json:
            print(json.dumps(as_object(watch), indent=2))
        elif once:
            results.print(render(watch))
        else:
            try:
                with Live(render(watch), console=results, auto_refresh=False, screen=results.is_terminal) as live:
                    while True:
                        time.sleep(interval)
                        watch.look()
                        live.update(render(watch), refresh=True)
            except KeyboardInterrupt:
                pass
