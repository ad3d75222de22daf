"""What goes into the engine and what comes out: plain records of integers, text and int32 arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Float32Array = NDArray[np.float32]
MaskArray = NDArray[np.uint32]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Made-up values, evenly in mean +- spread; `seed` tells one tensor's from another's."""

    seed: int
    mean: float
    spread: float


@dataclass(frozen=True, slots=True)
class TensorSource:
    """One checkpoint tensor: `nbytes` bytes at `offset` of the shard `path`, or `values`, which no file has.

    `dtype` is spelled as in safetensors.
    """

    name: str
    path: Path | None
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    values: Synthetic | None = None


@dataclass(frozen=True, slots=True)
class RankOptions:
    """See glm_rank_options: the texts of the rank's plans, its device, and a driver compiled from the plans."""

    mixed_plan: str
    decode_plan: str
    device_ordinal: int = 0
    driver: Path | None = None  # None: the built-in executor


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """See glm_engine_options. `progress(done, total)` counts bytes and is called from loading threads."""

    kernels_path: Path
    ranks: Sequence[RankOptions]
    tensors: Sequence[TensorSource]
    max_rows: int
    max_samples: int
    max_slots: int
    max_context: int
    num_pages: int
    fit_pages: bool = False
    random_kv: bool = False
    num_threads: int = 0
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a request asks of the sampler; see glm_sampling for meanings and ranges. The defaults are greedy."""

    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    top_k: int = 0
    min_tokens: int = 0
    prompt_len: int = 0
    num_logprobs: int = -1
    stop_ids: Sequence[int] = ()
    logit_bias: Sequence[tuple[int, float]] = ()


def _empty() -> Int32Array:
    return np.empty(0, np.int32)


def _no_updates() -> Int32Array:
    return np.empty((0, 3), np.int32)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step; see glm_step_batch. T rows, N sequences, S samples, U page updates."""

    token_ids: Int32Array  # [T]; -1: the slot's newest sampled token
    positions: Int32Array  # [T]
    seq_slots: Int32Array  # [N]
    seq_starts: Int32Array  # [N + 1]: first row of each sequence, then T
    sample_rows: Int32Array = field(default_factory=_empty)  # [S], ascending; see glm_step_batch
    page_updates: Int32Array = field(default_factory=_no_updates)  # [U, 3]: slot, index, page; the last one counts
    decode: bool = False  # run the decode plan: one row a sequence, every row sampled
    forced_tokens: Int32Array | None = None  # [S]; -1: sampled
    sample_masks: Int32Array | None = None  # [S]: below num_masks; -1: any token
    num_masks: int = 0  # above 0: the step is held before it samples, until `set_masks`


@dataclass(frozen=True, slots=True)
class StepResult:
    """S sampled tokens. Log-probabilities are defined only for slots that asked for them."""

    token_ids: Int32Array  # [S]; -1: no logit was finite
    logprobs: Float32Array  # [S]
    top_ids: Int32Array  # [S, MAX_LOGPROBS]
    top_logprobs: Float32Array  # [S, MAX_LOGPROBS]
    device_ns: int


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """See glm_engine_progress."""

    calls: int
    where: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """See glm_engine_info. Sizes in bytes."""

    kernels: str
    device: str
    weight_bytes_mapped: int
    weight_bytes_copied: int
    kv_bytes: int
    scratch_bytes: int
    num_pages: int
    max_slots: int
    max_context: int
    vocab: int
    steps_run: int
