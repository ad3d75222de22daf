"""`glm bench serve`: a load on a router, and how it fared."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli.console import messages
from deploy.cli.options import (
    ApiKeyOption,
    ServedModelOption,
    TargetOption,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
)

if TYPE_CHECKING:
    from deploy.load.client import Sample

app = typer.Typer(help="Measure a running system.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure a running system."""


@app.command()
def serve(
    *,
    model: ServedModelOption = None,
    target: TargetOption = None,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    api_key: ApiKeyOption = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, metavar="R", help="Open loop: requests a second, Poisson.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Closed loop: requests kept in flight.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Replay: a JSON line each of arrival_s, prompt_tokens, output_tokens."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, metavar="S", help="How long requests are begun.")] = 20.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Random ids in each prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of each answer.")] = 32,
    prefix_tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Ids that all prompts begin with.")] = 0,
    connections: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="HTTP/2 connections.")] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Of arrivals and prompts.")] = 0,
    slo_ttft_ms: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Goodput: time to first token, at most.")
    ] = 1000.0,
    slo_tpot_ms: Annotated[
        float, typer.Option(min=0, metavar="MS", help="Goodput: mean time per output token, at most.")
    ] = 200.0,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write PNG files (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Load a router with streamed requests: exactly one of --rate, --concurrency and --trace."""
    if [rate, concurrency, trace].count(None) != 2:
        raise typer.BadParameter("give exactly one", param_hint="--rate / --concurrency / --trace")

    import uvloop  # noqa: PLC0415 - gRPC is slow to import

    from deploy.cli.access import Access  # noqa: PLC0415
    from deploy.cli.client import router_address  # noqa: PLC0415
    from deploy.load.arrivals import Arrival, poisson, read_trace  # noqa: PLC0415
    from deploy.load.client import connected  # noqa: PLC0415
    from deploy.load.plots import draw, require_matplotlib  # noqa: PLC0415
    from deploy.load.report import Slo, summarise  # noqa: PLC0415

    access = Access(tls_ca, tls_cert, tls_key, api_key)
    if plots is not None:
        require_matplotlib()
    arrivals: list[Arrival] = []
    if trace is not None:
        arrivals = read_trace(trace)
    elif rate is not None:
        arrivals = poisson(rate, seconds, prompt_tokens, output_tokens, seed)

    async def load(address: str) -> "list[Sample]":
        credentials, metadata = access.credentials(address), access.metadata()
        async with connected(
            address, connections, seed, prefix_tokens, credentials=credentials, metadata=metadata
        ) as client:
            if concurrency is not None:
                return await client.run_closed(Arrival(0.0, prompt_tokens, output_tokens), concurrency, seconds)
            return await client.run_open(arrivals)

    with router_address(model, target) as address:
        samples = uvloop.run(load(address))
    report = summarise(samples, Slo(slo_ttft_ms, slo_tpot_ms))
    if plots is not None:
        for path in draw(samples, plots):
            messages.print(f"written {path}", markup=False)
    if as_json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_report(report)


def print_report(report: dict[str, Any]) -> None:
    """For people."""
    statuses = ", ".join(f"{count} {status}" for status, count in sorted(report["by_status"].items()))
    goodput = report["goodput"]
    print(f"requests           {report['requests']} in {report['seconds']:.1f} s: {statuses or 'none'}")
    print(f"answered           {report['requests_per_s']:.2f} requests/s, {report['output_tokens_per_s']:.1f} tokens/s")
    print(
        f"goodput            {goodput['requests_per_s']:.2f} requests/s, {goodput['output_tokens_per_s']:.1f} tokens/s "
        f"(TTFT <= {goodput['slo_ttft_ms']:g} ms, per token <= {goodput['slo_tpot_ms']:g} ms)"
    )
    for label, key in (
        ("time to first", "ttft_ms"),
        ("inter-token", "inter_token_ms"),
        ("per output token", "time_per_output_token_ms"),
        ("latency", "latency_ms"),
        ("refusal", "refusal_ms"),
        ("client lag", "client_lag_ms"),
    ):
        if report[key] is not None:
            figures = "  ".join(f"{name} {value:.1f}" for name, value in report[key].items())
            print(f"{label:<18} ms  {figures}")
