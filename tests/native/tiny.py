"""Tiny plans, checkpoints and batches for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import (
    EngineOptions,
    Int32Array,
    RankOptions,
    Sampling,
    StepBatch,
    StepResult,
    TensorSource,
)

VOCAB = 100
HIDDEN = 8
MAX_ROWS = 24
MAX_SAMPLES = 3
MAX_SLOTS = 4
MAX_CONTEXT = 64
NUM_PAGES = 10

# The lines of a plan that the fault table can run; `mixed` has a quantize more, so that calls tell the plans apart.
HEAD = ["act f32", f"vocab {VOCAB}", "kv layers=2 kv_heads=1 head_dim=16 dtype=f32"]
BUFFERS = [
    f"buffer x f32 T {HIDDEN}",
    f"buffer q fp8 T {HIDDEN}",
    "buffer qs f32 T 1",
    f"buffer logits f32 S {VOCAB}",
]
WEIGHTS = [f"matrix table f32 {VOCAB} {HIDDEN}", f"part tensor=table rows=0:{VOCAB} cols=0:{HIDDEN}"]
OPS = ["op embed embed table=table out=x", "op sample sample logits=logits"]
QUANTIZE = "op quantize only.mixed x=x q=q scale=qs"


def plan(name: str, *more: str, drop: Sequence[str] = ()) -> str:
    """A whole plan: the usual lines without those in `drop`, and `more` at the end."""
    lines = ["glmplan 1", f"name {name}", *HEAD, *BUFFERS, *WEIGHTS, *OPS]
    if name == "mixed":
        lines.append(QUANTIZE)
    return "\n".join([*(line for line in lines if line not in drop), *more]) + "\n"


_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "F8_E4M3"}


def write_shard(path: Path, tensors: Mapping[str, NDArray[Any]], gap: int = 0) -> list[TensorSource]:
    """The tensors' bytes in a row, each on a multiple of 64 plus `gap`; uint16 stands for bf16, uint8 for FP8."""
    sources = []
    with path.open("wb") as file:
        for name, array in tensors.items():
            file.write(b"\0" * (-file.tell() % 64 + gap))
            source = TensorSource(name, path, file.tell(), array.nbytes, _DTYPES[array.dtype.name], array.shape)
            sources.append(source)
            file.write(array.tobytes())
    return sources


def table_tensor() -> NDArray[np.float32]:
    return np.arange(VOCAB * HIDDEN, dtype=np.float32).reshape(VOCAB, HIDDEN)


def options(
    kernels: Path,
    tensors: Sequence[TensorSource],
    *,
    mixed_plan: str = plan("mixed"),
    decode_plan: str = plan("decode"),
    **changes: Any,
) -> EngineOptions:
    values: dict[str, Any] = {
        "kernels_path": kernels,
        "ranks": [RankOptions(mixed_plan, decode_plan)],
        "tensors": tensors,
        "max_rows": MAX_ROWS,
        "max_samples": MAX_SAMPLES,
        "max_slots": MAX_SLOTS,
        "max_context": MAX_CONTEXT,
        "num_pages": NUM_PAGES,
        "num_threads": 2,
    }
    return EngineOptions(**{**values, **changes})


def ints(*values: int) -> Int32Array:
    return np.array(values, np.int32)


NO_TOKENS = ints()


def bind(engine: Engine, *slots: int, sampling: Sampling | None = None) -> None:
    for slot in slots:
        engine.bind_slot(slot, sampling or Sampling(), NO_TOKENS, NO_TOKENS)


def pages(*updates: tuple[int, int, int]) -> Int32Array:
    return np.array(updates, np.int32).reshape(-1, 3)


def batch(
    *sequences: tuple[int, int, Sequence[int]],
    samples: Sequence[int] | None = None,
    updates: Sequence[tuple[int, int, int]] = (),
    decode: bool = False,
) -> StepBatch:
    """Sequences of (slot, first position, tokens); `samples`: rows, by default the last of each sequence."""
    lengths = [len(tokens) for _, _, tokens in sequences]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    rows = [int(end) - 1 for end in starts[1:]] if samples is None else list(samples)
    return StepBatch(
        token_ids=ints(*(token for _, _, tokens in sequences for token in tokens)),
        positions=ints(*(first + i for _, first, tokens in sequences for i in range(len(tokens)))),
        seq_slots=ints(*(slot for slot, _, _ in sequences)),
        seq_starts=starts,
        sample_rows=ints(*rows),
        page_updates=pages(*updates),
        decode=decode,
    )


def step(engine: Engine, submitted: StepBatch) -> StepResult:
    engine.submit(submitted)
    return engine.collect()
