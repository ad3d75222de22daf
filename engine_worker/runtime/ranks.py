"""What a model's ranks are to the native engine."""

from __future__ import annotations

from engine_worker.models import Model
from engine_worker.plan.dump import dump
from engine_worker.runtime.records import RankOptions


def rank_options(model: Model, first_gpu: int | None = None) -> list[RankOptions]:
    """Of each rank; on GPUs, one after another from `first_gpu`."""
    return [
        RankOptions(dump(rank.mixed), dump(rank.decode), 0 if first_gpu is None else first_gpu + index)
        for index, rank in enumerate(model.ranks)
    ]
