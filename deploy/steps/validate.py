"""A checkpoint against what the model needs of it, from its headers alone: no weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.errors import ModelError
from deploy.steps.download import check_shards

if TYPE_CHECKING:
    from engine_worker.models import KvDtypeSetting


@dataclass(frozen=True)
class Serving:
    """What a rank is to hold: KV pages for `sequences` of `context` tokens, steps of at most `step_tokens` rows."""

    tp: int = 1
    ep: int | None = None
    kv_dtype: KvDtypeSetting = "auto"
    sequences: int = 64
    context: int = 4096
    step_tokens: int = 2048


def validate(directory: Path, serving: Serving) -> dict[str, Any]:
    """Every tensor of the plans is there with its dtype and shape, none is left over, the ranks divide the model.

    Returns the revision, the number of tensors and bytes of each rank. ModelError names what is wrong.
    """
    from engine_worker.errors import WorkerError  # noqa: PLC0415 - slow to import
    from engine_worker.models import Parallelism, build_model  # noqa: PLC0415
    from engine_worker.plan.memory import rank_memory  # noqa: PLC0415
    from engine_worker.runtime.c_types import PAGE_SIZE  # noqa: PLC0415

    check_shards(directory)
    try:
        model = build_model(directory, serving.kv_dtype, Parallelism(serving.tp, serving.ep))
    except WorkerError as error:
        raise ModelError(str(error)) from None
    pages = serving.sequences * -(-serving.context // PAGE_SIZE)
    ranks = [
        rank_memory(
            rank.mixed,
            rank.decode,
            tokens=serving.step_tokens,
            samples=serving.sequences,
            pages=pages,
            page_size=PAGE_SIZE,
        )
        for rank in model.ranks
    ]
    return {
        "model": directory.name,
        "revision": model.revision,
        "tensors": len(model.tensors),
        "serving": asdict(serving),
        "ranks": [{**asdict(memory), "total": memory.total} for memory in ranks],
    }
