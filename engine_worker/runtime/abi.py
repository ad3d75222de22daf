"""The C ABI of native/include/glm/runtime.h, mirrored; c_types.py beside it has the structs. Nothing else uses ctypes.

Array arguments are C-contiguous int32 NumPy arrays; results are copies. Errors are those of `engine_worker.errors`.
All calls block without holding the interpreter lock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from engine_worker import errors
from engine_worker.runtime import c_types as c
from engine_worker.runtime.c_types import MAX_LOGPROBS
from engine_worker.runtime.records import (
    EngineInfo,
    EngineOptions,
    EngineProgress,
    Int32Array,
    MaskArray,
    Progress,
    RankOptions,
    Sampling,
    StepBatch,
    StepResult,
)

# GLM_LIBRARY_DIR: another build of the shared objects, as the sanitizer runs use.
LIBRARY_DIR = Path(os.environ.get("GLM_LIBRARY_DIR") or Path(__file__).resolve().parent.parent / "lib")


_ERRORS: dict[int, type[errors.WorkerError]] = {
    1: errors.InvalidRequestError,
    2: errors.UnsupportedError,
    3: errors.CheckpointError,
    4: errors.OutOfMemoryError,
    5: errors.DeviceError,
    6: errors.InternalError,
}


def kernel_table_path(name: str) -> Path:
    """The shared object of the built-in kernel table `name` ("cpu", "cuda", "futhark", ...)."""
    return LIBRARY_DIR / f"libglm_kernels_{name}.so"


class Library:
    """libglm_runtime.so, loaded and with typed entry points."""

    def __init__(self, path: Path = LIBRARY_DIR / "libglm_runtime.so") -> None:
        """Load `path`. Raises UnsupportedError if it is missing, cannot be loaded or has another version."""
        if not path.exists():
            raise errors.UnsupportedError(f"native runtime {path} is missing: run `make build`")
        try:
            self._dll = ctypes.CDLL(str(path))
        except OSError as error:
            raise errors.UnsupportedError(
                f"native runtime {path} cannot be loaded ({error}): run `make build`"
            ) from error
        self._dll.glm_runtime_version.restype = ctypes.c_uint32
        version = self._dll.glm_runtime_version()
        if version != c.RUNTIME_VERSION:
            raise errors.UnsupportedError(
                f"native runtime {path} has version {version}, expected {c.RUNTIME_VERSION}: run `make build`"
            )
        engine = ctypes.c_void_p
        ints, count = ctypes.c_void_p, ctypes.c_int32
        signatures: dict[str, tuple[Any, ...]] = {
            "probe": (ctypes.c_char_p, ctypes.c_int32),
            "read_bandwidth": (ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_double)),
            "create": (ctypes.POINTER(c.CEngineOptions), ctypes.POINTER(ctypes.c_void_p)),
            "get_info": (engine, ctypes.POINTER(c.CEngineInfo)),
            "bind_slot": (engine, count, ctypes.POINTER(c.CSampling), ints, count, ints, count),
            "release_slot": (engine, count),
            "submit": (engine, ctypes.POINTER(c.CStepBatch)),
            "set_masks": (engine, ctypes.c_void_p),
            "collect": (engine, ctypes.POINTER(c.CStepResult)),
            "expert_loads": (engine, count, ctypes.c_void_p, ctypes.c_size_t),
            "get_progress": (engine, ctypes.POINTER(c.CEngineProgress)),
            "abort": (engine, ctypes.c_char_p),
            "read_buffer": (engine, count, ctypes.c_char_p, count, ctypes.c_void_p, ctypes.c_size_t),
            "write_buffer": (engine, count, ctypes.c_char_p, count, ctypes.c_void_p, ctypes.c_size_t),
            "run_ops": (engine, ctypes.POINTER(c.CStepBatch), ints, count, count, ctypes.POINTER(c.CStepResult)),
        }
        for name, arguments in signatures.items():
            function = getattr(self._dll, f"glm_engine_{name}")
            function.argtypes = (*arguments, ctypes.POINTER(c.CError))
            function.restype = ctypes.c_int
        self._dll.glm_engine_destroy.argtypes = (engine,)
        self._dll.glm_engine_destroy.restype = None

    def call(self, name: str, *arguments: object) -> None:
        """Call glm_engine_`name`; raise what its status means."""
        error = c.CError()
        status = getattr(self._dll, f"glm_engine_{name}")(*arguments, ctypes.byref(error))
        if status != 0:
            message = error.message.decode("utf-8", "replace")
            raise _ERRORS.get(status, errors.InternalError)(message)

    def probe(self, kernels_path: Path, device_ordinal: int = 0) -> None:
        """Open and close the table's device. Raises UnsupportedError (no such table, driver or GPU) or DeviceError."""
        self.call("probe", str(kernels_path).encode(), device_ordinal)

    def read_bandwidth(self, kernels_path: Path, device_ordinal: int = 0, num_threads: int = 0) -> float:
        """Bytes a second that the table's device reads of its memory at best. Raises as `probe` does."""
        out = ctypes.c_double()
        self.call("read_bandwidth", str(kernels_path).encode(), device_ordinal, num_threads, ctypes.byref(out))
        return out.value

    def destroy(self, handle: ctypes.c_void_p) -> None:
        self._dll.glm_engine_destroy(handle)


class Engine:
    """One native engine. Use from one thread, except `info`, `expert_loads`, `progress` and `abort`."""

    def __init__(self, library: Library, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def create(cls, options: EngineOptions, library: Library | None = None) -> Self:
        """Map the checkpoint, bind the plans and allocate everything.

        Raises InvalidRequestError (plan or sizes), CheckpointError, UnsupportedError (kernels), OutOfMemoryError, and
        what `options.progress` raised, after loading.
        """
        library = library or Library()
        raised: list[BaseException] = []
        handle = ctypes.c_void_p()
        c_options, kept = _c_options(options, raised)
        library.call("create", ctypes.byref(c_options), ctypes.byref(handle))
        del kept
        engine = cls(library, handle)
        if raised:
            engine.close()
            raise raised[0]
        return engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for steps in flight and free everything. Idempotent."""
        self._library.destroy(self._handle)
        self._handle = ctypes.c_void_p()

    def info(self) -> EngineInfo:
        raw = c.CEngineInfo()
        self._library.call("get_info", self._handle, ctypes.byref(raw))
        values: dict[str, Any] = {name: getattr(raw, name) for name, _ in c.CEngineInfo._fields_}
        values.update(kernels=raw.kernels.decode(), device=raw.device.decode())
        return EngineInfo(**values)

    def bind_slot(self, slot: int, sampling: Sampling, prompt: Int32Array, sampled: Int32Array) -> None:
        """Give `slot` to a request whose history is `prompt`, then `sampled` (both may be empty without penalties)."""
        for name, array in (("prompt", prompt), ("sampled", sampled)):
            _check(name, array, (None,))
        history = (prompt.ctypes.data, len(prompt), sampled.ctypes.data, len(sampled))
        self._library.call("bind_slot", self._handle, slot, ctypes.byref(_c_sampling(sampling)), *history)

    def release_slot(self, slot: int) -> None:
        """Idempotent; the slot's page table is forgotten."""
        self._library.call("release_slot", self._handle, slot)

    def submit(self, batch: StepBatch) -> None:
        """Queue a step; the arrays are copied. At most MAX_IN_FLIGHT steps may be uncollected."""
        self._library.call("submit", self._handle, ctypes.byref(_c_batch(batch)))

    def set_masks(self, masks: MaskArray) -> None:
        """[num_masks, ceil(vocab / 32)]: bit id % 32 of word id // 32. Of the oldest step that is held; copied."""
        if masks.dtype != np.uint32 or not masks.flags.c_contiguous or masks.ndim != 2:
            raise errors.InvalidRequestError(f"masks: expected contiguous uint32 of 2 dimensions, got {masks.dtype}")
        self._library.call("set_masks", self._handle, masks.ctypes.data)

    def collect(self) -> StepResult:
        """Wait for the oldest uncollected step."""
        raw = c.CStepResult()
        self._library.call("collect", self._handle, ctypes.byref(raw))
        return _result(raw)

    def run_ops(self, batch: StepBatch, ops: Sequence[int], repeats: int = 1) -> StepResult:
        """Run the ops at these places in the batch's plan, in this order, `repeats` times; the engine must be idle.

        `device_ns` is the shortest time of the whole list. For profiles and for comparing kernel tables.
        """
        places = np.array(ops, np.int32)
        raw = c.CStepResult()
        arguments = (ctypes.byref(_c_batch(batch)), places.ctypes.data, len(places), repeats, ctypes.byref(raw))
        self._library.call("run_ops", self._handle, *arguments)
        return _result(raw)

    def expert_loads(self, rank: int, count: int) -> NDArray[np.uint64]:
        """Tokens that the rank's experts have been given since create, [moe_group of its plan * its experts], by place.

        From any thread; waits for the steps in flight.
        """
        out = np.empty(count, np.uint64)
        self._library.call("expert_loads", self._handle, rank, out.ctypes.data, count)
        return out

    def progress(self) -> EngineProgress:
        """Where the ranks are; from any thread, also while another call is stuck."""
        raw = c.CEngineProgress()
        self._library.call("get_progress", self._handle, ctypes.byref(raw))
        return EngineProgress(raw.calls, raw.where.decode("utf-8", "replace"))

    def abort(self, reason: str) -> None:
        """Fail the engine from another thread, because a step does not end: `collect` raises DeviceError(reason).

        A rank that stays in an operation keeps `close` waiting.
        """
        self._library.call("abort", self._handle, reason.encode())

    def read_buffer(self, name: str, shape: tuple[int, int], dtype: DTypeLike, rank: int = 0) -> NDArray[Any]:
        """Copy `shape` = (rows, cols) of a plan buffer as the last step left it; bf16 as uint16, FP8 as uint8."""
        out = np.empty(shape, dtype)
        self._library.call("read_buffer", self._handle, rank, name.encode(), shape[0], out.ctypes.data, out.nbytes)
        return out

    def write_buffer(self, name: str, values: NDArray[Any], rank: int = 0) -> None:
        """Set the first rows of a plan buffer; the engine must be idle. bf16 as uint16, FP8 as uint8."""
        data = np.ascontiguousarray(values)
        self._library.call("write_buffer", self._handle, rank, name.encode(), len(data), data.ctypes.data, data.nbytes)


def _c_batch(batch: StepBatch) -> c.CStepBatch:
    """Points into the batch's arrays."""
    num_rows, num_seqs = len(batch.token_ids), len(batch.seq_slots)
    shapes: dict[str, tuple[int | None, ...]] = {
        "token_ids": (None,),
        "positions": (num_rows,),
        "seq_slots": (None,),
        "seq_starts": (num_seqs + 1,),
        "sample_rows": (None,),
        "page_updates": (None, 3),
    }
    choices = {"forced_tokens": batch.forced_tokens, "sample_masks": batch.sample_masks}
    for name, shape in shapes.items():
        _check(name, getattr(batch, name), shape)
    for name, array in choices.items():
        if array is not None:
            _check(name, array, (len(batch.sample_rows),))
    counts = (num_rows, num_seqs, len(batch.sample_rows), len(batch.page_updates))
    plan = c.PLAN_DECODE if batch.decode else c.PLAN_MIXED
    arrays = [getattr(batch, name).ctypes.data for name in shapes]
    arrays += [None if array is None else array.ctypes.data for array in choices.values()]
    return c.CStepBatch(*counts, plan, *arrays, batch.num_masks)


def _result(raw: c.CStepResult) -> StepResult:
    count = raw.num_samples
    return StepResult(
        token_ids=_copy(raw.token_ids, (count,), np.int32),
        logprobs=_copy(raw.logprobs, (count,), np.float32),
        top_ids=_copy(raw.top_ids, (count, MAX_LOGPROBS), np.int32),
        top_logprobs=_copy(raw.top_logprobs, (count, MAX_LOGPROBS), np.float32),
        device_ns=raw.device_ns,
    )


def _check(name: str, array: Int32Array, shape: tuple[int | None, ...]) -> None:
    fits = array.ndim == len(shape) and all(want in (None, got) for got, want in zip(array.shape, shape, strict=True))
    if array.dtype != np.int32 or not array.flags.c_contiguous or not fits:
        wanted = "x".join("n" if size is None else str(size) for size in shape)
        raise errors.InvalidRequestError(
            f"{name}: expected contiguous int32 of shape {wanted}, got {array.dtype} of shape {array.shape}"
        )


def _copy(address: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    out = np.empty(shape, dtype)
    if out.nbytes:
        ctypes.memmove(out.ctypes.data, address, out.nbytes)
    return out


def _c_sampling(sampling: Sampling) -> c.CSampling:
    for name, count, limit in (
        ("stop_ids", len(sampling.stop_ids), c.MAX_STOP_IDS),
        ("logit_bias", len(sampling.logit_bias), c.MAX_LOGIT_BIAS),
    ):
        if count > limit:
            raise errors.InvalidRequestError(f"{name}: {count} entries, at most {limit} are allowed")
    raw = c.CSampling(num_stop_ids=len(sampling.stop_ids), num_bias=len(sampling.logit_bias))
    for name in (field_name for field_name, _ in c.CSampling._fields_[:11]):
        setattr(raw, name, getattr(sampling, name))
    raw.stop_ids[: len(sampling.stop_ids)] = list(sampling.stop_ids)
    raw.bias_ids[: len(sampling.logit_bias)] = [token for token, _ in sampling.logit_bias]
    raw.bias_values[: len(sampling.logit_bias)] = [value for _, value in sampling.logit_bias]
    return raw


def _c_options(options: EngineOptions, raised: list[BaseException]) -> tuple[c.CEngineOptions, list[object]]:
    """The C options, and the objects they point into: keep those until the call has returned."""
    tensors = (c.CTensorSource * len(options.tensors))()
    for raw, source in zip(tensors, options.tensors, strict=True):
        if len(source.shape) > c.MAX_DIMS:
            raise errors.CheckpointError(
                f"tensor {source.name}: rank {len(source.shape)}, at most {c.MAX_DIMS} is supported"
            )
        raw.name, raw.path = source.name.encode(), None if source.path is None else str(source.path).encode()
        if source.values is not None:
            raw.seed, raw.mean, raw.spread = source.values.seed, source.values.mean, source.values.spread
        raw.offset, raw.bytes, raw.dtype = source.offset, source.nbytes, source.dtype.encode()
        raw.rank = len(source.shape)
        raw.shape[: len(source.shape)] = source.shape
    ranks = (c.CRankOptions * len(options.ranks))(*map(_c_rank, options.ranks))
    progress = _c_progress(options.progress, raised)
    c_options = c.CEngineOptions(
        kernels_path=str(options.kernels_path).encode(),
        ranks=ranks,
        num_ranks=len(ranks),
        tensors=tensors,
        num_tensors=len(tensors),
        progress=progress,
        **{name: getattr(options, name) for name in _OPTION_INTEGERS},
    )
    return c_options, [ranks, tensors, progress]


def _c_rank(rank: RankOptions) -> c.CRankOptions:
    driver = None if rank.driver is None else str(rank.driver).encode()
    return c.CRankOptions(rank.device_ordinal, rank.mixed_plan.encode(), rank.decode_plan.encode(), driver)


_OPTION_INTEGERS = tuple(
    name
    for name, kind in c.CEngineOptions._fields_
    if kind is ctypes.c_int32 and name not in ("num_ranks", "num_tensors")
)


def _c_progress(progress: Progress | None, raised: list[BaseException]) -> Any:
    """A callback that keeps what `progress` raises: an exception cannot pass through C."""
    if progress is None:
        return c.CProgress()

    def report(_: object, done: int, total: int) -> None:
        try:
            if not raised:
                progress(done, total)
        except BaseException as error:
            raised.append(error)

    return c.CProgress(report)
