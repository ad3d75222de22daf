"""Runs one operation of a kernel table on NumPy arrays: loading, device memory, poisoned outputs, comparison.

A new table joins the suite by being named in `TABLES`; cases and oracles do not change. `Buffer` alone knows how device
memory is reached.
"""

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels import abi
from tests.kernels.device_memory import DeviceMemory, HostMemory, Memory

Array = npt.NDArray[Any]
F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]

ROOT = Path(__file__).resolve().parents[2]

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)
F16 = np.dtype(np.float16)
I32 = np.dtype(np.int32)
U16 = np.dtype(np.uint16)

DTYPES = {
    F32: abi.Dtype.F32,
    BF16: abi.Dtype.BF16,
    F16: abi.Dtype.F16,
    FP8: abi.Dtype.FP8_E4M3,
    I32: abi.Dtype.I32,
    U16: abi.Dtype.U16,
}
FORMATS = {F32: abi.WeightFormat.F32, BF16: abi.WeightFormat.BF16, F16: abi.WeightFormat.F16}

# Name of a table -> (environment variable with another path, installed path).
TABLES = {
    "cpu": ("GLM_KERNELS_CPU", ROOT / "engine_worker" / "lib" / "libglm_kernels_cpu.so"),
    "cuda": ("GLM_KERNELS_CUDA", ROOT / "engine_worker" / "lib" / "libglm_kernels_cuda.so"),
    "futhark": ("GLM_KERNELS_FUTHARK", ROOT / "engine_worker" / "lib" / "libglm_kernels_futhark.so"),
    "futhark_cuda": ("GLM_KERNELS_FUTHARK_CUDA", ROOT / "engine_worker" / "lib" / "libglm_kernels_futhark_cuda.so"),
    "futhark_opencl": (
        "GLM_KERNELS_FUTHARK_OPENCL",
        ROOT / "engine_worker" / "lib" / "libglm_kernels_futhark_opencl.so",
    ),
    "futhark_hip": ("GLM_KERNELS_FUTHARK_HIP", ROOT / "engine_worker" / "lib" / "libglm_kernels_futhark_hip.so"),
}

_GUARD = 64
_CHUNK = 16 << 20
_GUARD_BYTE = 0xA5


class _Current(threading.local):
    memory: Memory = HostMemory()


_current = _Current()


def use_memory(memory: Memory) -> None:
    """Buffers that this thread makes from now on lie in this memory."""
    _current.memory = memory


class Buffer:
    """Device memory with a guard zone on both sides, 64-byte aligned plus `misalign` bytes."""

    def __init__(self, array: Array, misalign: int = 0) -> None:
        source = np.ascontiguousarray(array)
        self.shape = source.shape
        self.dtype = source.dtype
        raw = np.full(source.nbytes + 3 * _GUARD + misalign, _GUARD_BYTE, np.uint8)
        image = raw[-raw.ctypes.data % 64 :]
        start = _GUARD + misalign
        self._raw, self._memory = image, _current.memory
        self._body = image[start : start + source.nbytes]
        self._body[:] = source.reshape(-1).view(np.uint8)
        self._address = self._memory.place(image)
        self.pointer = self._address + start

    def __del__(self) -> None:
        self._memory.release(self._address, self._raw.size)

    def read(self) -> Array:
        """The contents; fails if something was written just outside of them."""
        self._memory.fetch(self._address, self._raw)
        start = self.pointer - self._address
        before, after = self._raw[:start], self._raw[start + self._body.size :]
        assert (before == _GUARD_BYTE).all(), "written in front of the buffer"
        assert (after == _GUARD_BYTE).all(), "written past the end of the buffer"
        return self._body.view(self.dtype).reshape(self.shape).copy()


def poison(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """NaN in every float, 0x7f7f7f7f in every int: what an output holds before the operation."""
    kind = np.dtype(dtype)
    byte = 0x7F if kind in (I32, U16) else 0xFF
    return np.full(int(np.prod(shape)) * kind.itemsize, byte, np.uint8).view(kind).reshape(shape)


@dataclass
class BoundTensor:
    """A [rows][cols] array in device memory with `stride` elements from row to row, the gap poisoned."""

    buffer: Buffer
    cols: int
    gap: Array

    @property
    def struct(self) -> abi.Tensor:
        return abi.Tensor(self.buffer.pointer, DTYPES[self.buffer.dtype], self.cols, self.buffer.shape[1])

    def read(self) -> Array:
        whole = self.buffer.read()
        assert whole[:, self.cols :].tobytes() == self.gap.tobytes(), "written between the rows"
        return np.ascontiguousarray(whole[:, : self.cols])


def tensor(array: Array, stride: int | None = None) -> BoundTensor:
    rows, cols = array.shape
    whole = poison((rows, cols if stride is None else stride), array.dtype)
    whole[:, :cols] = array
    return BoundTensor(Buffer(whole), cols, whole[:, cols:].copy())


def output(rows: int, cols: int, dtype: npt.DTypeLike, stride: int | None = None) -> BoundTensor:
    return tensor(poison((rows, cols), dtype), stride)


ABSENT = abi.Tensor(None, abi.Dtype.F32, 0, 0)


@dataclass
class BoundWeight:
    """Weights as a checkpoint has them: aligned to their element only."""

    data: Buffer
    scale: Buffer | None = None

    @property
    def struct(self) -> abi.Weight:
        rows, cols = self.data.shape
        scale = self.scale
        stride = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 0
        return abi.Weight(self.data.pointer, cols, scale.pointer if scale else None, stride, rows)


def weight(array: Array, scale: Array | None = None) -> BoundWeight:
    """scale: None, [rows] per channel, or [ceil(rows/128)][ceil(cols/128)] per block."""
    return BoundWeight(Buffer(array, array.dtype.itemsize), None if scale is None else Buffer(scale.astype(F32)))


class Device:
    def __init__(self, table: "Table", num_threads: int, ordinal: int = 0) -> None:
        self.table = table
        self._handle = ctypes.c_void_p()
        error = ctypes.create_string_buffer(512)
        options = abi.DeviceOptions(ordinal, num_threads)
        status = table.kernels.device_open(options, ctypes.byref(self._handle), error, len(error))
        if status != abi.Status.OK:
            raise RuntimeError(f"{table.name}: {abi.Status(status).name}: {error.value.decode()}")
        # Where this device's buffers must lie.
        chunk = _CHUNK if table.name == "futhark_opencl" else 0
        self.memory: Memory = HostMemory() if table.on_host else DeviceMemory(table.kernels, self._handle, chunk)

    def close(self) -> None:
        self.table.kernels.device_close(self._handle)

    @property
    def handle(self) -> ctypes.c_void_p:
        return self._handle

    @property
    def description(self) -> str:
        text: bytes = self.table.kernels.device_description(self._handle)
        return text.decode()

    def run(self, op: abi.Op, args: ctypes.Structure) -> None:
        """Give the device a workspace of the size it asks for, poisoned, and run the operation."""
        assert isinstance(args, abi.OP_ARGS[op])
        size = self.table.kernels.workspace_bytes(self._handle, op, ctypes.byref(args))
        workspace = Buffer(poison((size,), np.uint8))
        self.table.kernels.set_workspace(self._handle, workspace.pointer, size)
        status = self.call(op, args)
        assert status == abi.Status.OK, f"{op.name} returned {abi.Status(status).name}: {self.last_error}"
        self.memory.wait()
        workspace.read()

    @property
    def last_error(self) -> str:
        text: bytes = self.table.kernels.last_error(self._handle)
        return text.decode()

    def status_of(self, op: abi.Op, args: ctypes.Structure) -> int:
        """Of the call, or, if that is fine, of what it left to run."""
        called = self.call(op, args)
        status: int = called if called != abi.Status.OK else self.table.kernels.synchronize(self._handle)
        return status

    def call(self, op: abi.Op, args: ctypes.Structure) -> int:
        """The status of the operation, with the workspace that the device has."""
        status: int = getattr(self.table.kernels, op.name.lower())(self._handle, ctypes.byref(args))
        if status == abi.Status.UNSUPPORTED and self.table.name.startswith("futhark"):
            pytest.skip(self.last_error)
        return status


@dataclass
class Table:
    name: str
    kernels: abi.Kernels
    library: ctypes.CDLL

    @property
    def on_host(self) -> bool:
        return bool(self.kernels.flags & abi.HOST_MEMORY)

    def open(self, num_threads: int = 2, ordinal: int = 0) -> Device:
        return Device(self, num_threads, ordinal)


def table_path(name: str) -> Path:
    variable, installed = TABLES[name]
    return Path(os.environ.get(variable, installed))


def load_table(name: str) -> Table:
    path = table_path(name)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such kernel library; run `make build` or set {TABLES[name][0]}")
    library = ctypes.CDLL(str(path))
    library.glm_kernels_query.restype = ctypes.POINTER(abi.Kernels)
    library.glm_kernels_query.argtypes = [ctypes.c_uint32]
    found = library.glm_kernels_query(abi.VERSION)
    assert found, f"{path} does not speak version {abi.VERSION}"
    return Table(name, found.contents, library)


@dataclass
class SlotState:
    """Host image of glm_slots; `bind` puts it into device memory."""

    page_table: npt.NDArray[np.int32]  # [max_slots][max_pages]
    vocab: int = 1
    sampling: Sequence[abi.Sampling] = ()
    counts: npt.NDArray[np.uint16] | None = None
    last_token: npt.NDArray[np.int32] | None = None

    def bind(self) -> "BoundSlots":
        return BoundSlots(self)


class BoundSlots:
    def __init__(self, state: SlotState) -> None:
        max_slots, max_pages = state.page_table.shape
        sampling = (abi.Sampling * max_slots)(*state.sampling)
        counts = np.zeros((max_slots, state.vocab), U16) if state.counts is None else state.counts
        last = np.full(max_slots, -7, I32) if state.last_token is None else state.last_token
        self.sampling = Buffer(np.frombuffer(sampling, np.uint8))
        self.last_token = Buffer(last.astype(I32))
        self.page_table = Buffer(state.page_table.astype(I32))
        self.counts = Buffer(counts)
        self.struct = abi.Slots(
            self.sampling.pointer,
            self.last_token.pointer,
            self.page_table.pointer,
            self.counts.pointer,
            max_slots,
            max_pages,
            state.vocab,
        )


@dataclass
class Chunk:
    """`length` consecutive tokens of the sequence in `slot`, from position `start`."""

    slot: int
    start: int
    length: int


@dataclass
class Step:
    """Host image of glm_step_inputs, built from the chunks in their order in the batch."""

    chunks: Sequence[Chunk]
    token_ids: Sequence[int] | None = None
    sample_rows: Sequence[int] = ()
    sample_slots: Sequence[int] = ()
    sample_masks: Sequence[int] | None = None  # None: any token
    forced_tokens: Sequence[int] | None = None  # None: all are sampled
    masks: npt.NDArray[np.uint32] | None = None  # [masks][ceil(vocab / 32)]
    positions: npt.NDArray[np.int32] = field(init=False)
    row_slots: npt.NDArray[np.int32] = field(init=False)
    seq_starts: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        spans = [np.arange(chunk.start, chunk.start + chunk.length, dtype=I32) for chunk in self.chunks]
        self.positions = np.concatenate([*spans, np.zeros(0, I32)])
        self.row_slots = np.repeat([chunk.slot for chunk in self.chunks], [c.length for c in self.chunks]).astype(I32)
        self.seq_starts = np.cumsum([0, *(chunk.length for chunk in self.chunks)]).astype(I32)

    @property
    def rows(self) -> int:
        return int(self.seq_starts[-1])

    def bind(self) -> "BoundStep":
        return BoundStep(self)


class BoundStep:
    def __init__(self, step: Step) -> None:
        samples = len(step.sample_rows)
        tokens = np.zeros(step.rows, I32) if step.token_ids is None else np.asarray(step.token_ids, I32)
        inputs = [
            tokens,
            step.positions,
            step.row_slots,
            np.asarray([chunk.slot for chunk in step.chunks], I32),
            step.seq_starts,
            np.asarray(step.sample_rows, I32),
            np.asarray(step.sample_slots, I32),
        ]
        self._inputs = [Buffer(array) for array in inputs]
        self.out_token_ids = Buffer(poison((samples,), I32))
        self.out_logprobs = Buffer(poison((samples,), F32))
        self.out_top_ids = Buffer(poison((samples, abi.MAX_LOGPROBS), I32))
        self.out_top_logprobs = Buffer(poison((samples, abi.MAX_LOGPROBS), F32))
        outputs = [self.out_token_ids, self.out_logprobs, self.out_top_ids, self.out_top_logprobs]
        any_token = [-1] * samples
        self._choices = [
            Buffer(np.asarray(any_token if step.sample_masks is None else step.sample_masks, I32)),
            Buffer(np.asarray(any_token if step.forced_tokens is None else step.forced_tokens, I32)),
            Buffer(np.zeros(0, np.uint32) if step.masks is None else step.masks),
        ]
        pointers = [buffer.pointer for buffer in [*self._inputs, *outputs, *self._choices]]
        self.struct = abi.StepInputs(step.rows, len(step.chunks), samples, *pointers)


def relative_error(actual: Array, expected: Array) -> float:
    """Largest |actual - expected| / (|expected| + rms of the expected row): 0 for empty arrays, inf for NaN."""
    if expected.size == 0:
        return 0.0
    got, want = actual.astype(np.float64), expected.astype(np.float64)
    rms = np.sqrt(np.mean(np.square(want), axis=-1, keepdims=True))
    error = np.abs(got - want) / (np.abs(want) + rms + 1e-30)
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def assert_close(actual: Array, expected: Array, tolerance: float) -> None:
    assert actual.shape == expected.shape
    error = relative_error(actual, expected)
    assert error <= tolerance, f"relative error {error:.3g}, allowed {tolerance:.3g}"


def assert_bits_equal(actual: Array, expected: Array) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    different = np.flatnonzero(actual.reshape(-1).view(np.uint8) != expected.reshape(-1).view(np.uint8))
    assert different.size == 0, f"{different.size} bytes differ, first at {different[0]}"
