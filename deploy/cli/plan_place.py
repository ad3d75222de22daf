"""`glm plan place`."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli.console import worker_errors
from deploy.errors import DeployError

if TYPE_CHECKING:
    from engine_worker.models.placement import ExpertPlacement


def place(
    *,
    loads: Annotated[
        Path, typer.Option(metavar="FILE", help="What `glm worker --expert-loads FILE` has kept.", dir_okay=False)
    ],
    ep: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Groups of ranks: the worker's --ep.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="For `glm worker --expert-placement FILE`.")],
) -> None:
    """Choose which group of ranks holds which expert, so that tokens fall evenly on the groups.

    Each group holds as many experts as before. Prints what the busiest group of a layer has over the mean of all.
    """
    from engine_worker.models.placement import balanced, read_loads  # noqa: PLC0415

    with worker_errors():
        counts = read_loads(loads)
        placement = balanced(counts, ep)
    try:
        out.write_text(placement.text(), encoding="utf-8")
    except OSError as error:
        raise DeployError(f"cannot write {out}: {error.strerror}") from None
    for line in _report(counts, placement, ep):
        print(line)


def _report(counts: dict[int, list[int]], placement: "ExpertPlacement", ep: int) -> list[str]:
    from engine_worker.models.placement import even_groups, group_loads, imbalance  # noqa: PLC0415

    before = {layer: imbalance(group_loads(c, even_groups(len(c), ep))) for layer, c in counts.items()}
    after = {layer: imbalance(group_loads(c, placement.layers[layer])) for layer, c in counts.items()}

    def line(what: str, found: dict[int, float]) -> str:
        worst = max(found, key=lambda layer: found[layer])
        return f"{what:<14} {fmean(found.values()):.3f} (mean of layers), {found[worst]:.3f} (layer {worst})"

    return [
        f"{len(counts)} layers, {ep} groups; busiest group over mean:",
        line("in order of id", before),
        line("placed", after),
    ]
