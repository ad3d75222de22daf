"""How evenly tokens fall on experts and on the ranks that hold them: read from the engine now and then, told on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from engine_worker.models import Model
from engine_worker.models.placement import even_groups

log = structlog.get_logger()

_INTERVAL_S = 10.0

Counts = NDArray[np.uint64]


class LoadEngine(Protocol):
    """What is needed of `runtime.abi.Engine`, which states the contract."""

    def expert_loads(self, rank: int, count: int) -> Counts: ...


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """Tokens given to experts since start. `recent_*`: max over mean, of what came between the last two readings."""

    layers: tuple[int, ...]
    experts: Counts  # [layers][experts], by id
    groups: Counts  # [layers][groups of ranks]
    recent_experts: Sequence[float] = ()  # of each layer
    recent_groups: Sequence[float] = ()

    def text(self) -> str:
        """As `glm plan place` reads it."""
        layers = {str(layer): counts.tolist() for layer, counts in zip(self.layers, self.experts, strict=True)}
        return json.dumps({"version": 1, "layers": layers}) + "\n"


class ExpertLoadReader:
    """Of one engine. A model without experts has no loads."""

    def __init__(self, engine: LoadEngine, model: Model) -> None:
        self._engine = engine
        c, layout = model.config, model.ranks[0].layout
        self.layers = tuple(range(c.first_k_dense_replace, c.num_hidden_layers))
        # Ranks of a group count the same: the first of each is asked.
        inner = layout.tp // layout.ep
        self._asked = [
            (index, rank.layout.experts(c))
            for index, rank in enumerate(model.ranks)
            if rank.layout.alone or rank.layout.rank % inner == 0
        ]
        placed = even_groups(c.n_routed_experts, layout.ep) if self.layers else ()
        own = {p.name: p.experts for p in model.mixed.placements}
        in_order = tuple(expert for group in placed for expert in group)
        # [layers][places]: the expert there.
        self._order = np.array([own.get(f"layers.{i}.moe.placement", in_order) for i in self.layers], np.int64)
        self._num_groups = layout.ep
        self._last: ExpertLoads | None = None

    def read(self) -> ExpertLoads:
        """Waits for the steps in flight."""
        places = np.zeros(self._order.shape, np.uint64)
        for index, (first, end) in self._asked:
            counts = self._engine.expert_loads(index, len(self.layers) * (end - first))
            places[:, first:end] = counts.reshape(len(self.layers), -1)
        experts = np.zeros_like(places)
        np.put_along_axis(experts, self._order, places, axis=1)
        groups = places.reshape(len(self.layers), self._num_groups, -1).sum(axis=2, dtype=np.uint64)
        self._last = _with_recent(ExpertLoads(self.layers, experts, groups), self._last)
        return self._last


async def watch_expert_loads(
    reader: ExpertLoadReader, tell: Callable[[ExpertLoads], None], path: Path | None, interval_s: float = _INTERVAL_S
) -> None:
    """Read for ever, tell each reading and keep the newest in `path`; also once more when it is cancelled."""
    if not reader.layers:
        return
    try:
        while True:
            await asyncio.sleep(interval_s)
            _keep(await asyncio.to_thread(reader.read), tell, path)
    except asyncio.CancelledError:
        _keep(await asyncio.to_thread(reader.read), tell, path)
        raise


def _keep(loads: ExpertLoads, tell: Callable[[ExpertLoads], None], path: Path | None) -> None:
    tell(loads)
    if path is None:
        return
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(loads.text(), encoding="utf-8")
        new.replace(path)
    except OSError as error:  # a full disk is no reason to stop serving, or to stop telling
        log.warning("expert_loads_not_kept", path=str(path), error=str(error))


def _with_recent(now: ExpertLoads, before: ExpertLoads | None) -> ExpertLoads:
    """Where nothing came, what was recent before still is."""
    earlier = before or ExpertLoads(now.layers, np.zeros_like(now.experts), np.zeros_like(now.groups))
    new_experts, new_groups = now.experts - earlier.experts, now.groups - earlier.groups
    if before is not None and not new_experts.any():
        return ExpertLoads(now.layers, now.experts, now.groups, before.recent_experts, before.recent_groups)
    return ExpertLoads(now.layers, now.experts, now.groups, _imbalance(new_experts), _imbalance(new_groups))


def _imbalance(counts: Counts) -> list[float]:
    means = counts.mean(axis=1)
    busiest: list[float] = np.divide(counts.max(axis=1), means, out=np.ones_like(means), where=means > 0).tolist()
    return busiest
