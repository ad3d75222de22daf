"""`glm doctor`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from deploy.cli.plan import GpuOption


def doctor(
    *, gpu: GpuOption = 0, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False
) -> None:
    """Say which parts are built and found on this machine, and how to get the others. Exit code 1: nothing can run."""
    from deploy.steps.doctor import examine, missing  # noqa: PLC0415 - slow to import

    findings = examine(gpu)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.part) for finding in findings)
        for finding in findings:
            print(f"{finding.part:<{width}}  {finding.found or f'not there: {finding.remedy}'}")
    if any(missing(findings)):
        raise typer.Exit(1)
