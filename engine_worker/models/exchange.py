"""The exchange of tokens between ranks that hold whole experts (all-to-all; GShard, Lepikhin et al. 2020).

From the first layer with experts on each rank has some rows of the residual stream to itself. A sum over ranks becomes
a reduce-scatter, the shared expert lies on every rank in whole and computes that rank's rows, and tokens go to the
experts and their products come back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engine_worker.errors import ConfigError
from engine_worker.models.layout import Layout
from engine_worker.models.ops import Activation, Recorder
from engine_worker.plan.record import Rows, Size
from engine_worker.weights.records import Matrix

Exchange = Literal["replicate", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """How tokens and experts meet, in the mixed and in the decode plan."""

    mixed: Exchange = "replicate"
    decode: Exchange = "replicate"

    def __str__(self) -> str:
        return f"{self.mixed}/{self.decode}"


REPLICATED = Exchanges()


def check_exchange(layout: Layout, exchange: Exchange) -> None:
    """Raises ConfigError if the layout has no such exchange."""
    if exchange == "all_to_all" and (layout.ep != layout.tp or layout.alone):
        what = "a rank slice has nobody to exchange tokens with" if layout.alone else "experts are cut"
        raise ConfigError(
            f"expert_exchange: all_to_all, but with tp={layout.tp} ep={layout.ep} {what}; set ep to tp, or replicate"
        )


def own_rows(layout: Layout, exchange: Exchange) -> Rows | None:
    """What the rank has to itself; None where it has all rows, as all ranks."""
    return Rows(Size.OWN, layout.tp) if exchange == "all_to_all" and layout.exchanges else None


def gather_forms(p: Recorder, label: str, x: Activation) -> None:
    """All rows of each form of x, on all ranks."""
    for form, buffer in (("plain", x.plain), ("q", x.q), ("scale", x.scale)):
        if buffer is not None:
            p.all_gather(f"{label}.{form}", buffer)


def in_whole(matrix: Matrix) -> Matrix:
    """By a name of its own, beside the slice that another plan of the rank may have."""
    return replace(matrix, name=f"{matrix.name}.whole")
