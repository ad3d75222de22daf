"""native/include/glm/driver.h in ctypes, to call a driver without the runtime."""

from __future__ import annotations

import ctypes
from pathlib import Path

VERSION = 1


class Op(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("args", ctypes.c_void_p), ("id", ctypes.c_void_p))


class Mark(ctypes.Structure):
    _fields_ = (("op", ctypes.c_void_p), ("calls", ctypes.c_uint64))


class Binding(ctypes.Structure):
    _fields_ = (
        ("kernels", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("mark", ctypes.POINTER(Mark)),
        ("ops", ctypes.POINTER(Op)),
        ("num_ops", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("max_rows", ctypes.c_int32),
        ("max_samples", ctypes.c_int32),
    )


class Fault(ctypes.Structure):
    _fields_ = (("op", ctypes.c_int32), ("what", ctypes.c_char_p))


Start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Binding), ctypes.POINTER(Fault))
Run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(Fault))
Stop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plan(ctypes.Structure):
    _fields_ = (
        ("num_ops", ctypes.c_int32),
        ("context_bytes", ctypes.c_size_t),
        ("start", Start),
        ("forward", Run),
        ("sample", Run),
        ("stop", Stop),
    )


class Driver(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32),
        ("kernels_version", ctypes.c_uint32),
        ("compiler", ctypes.c_char_p),
        ("debug", ctypes.c_int32),
        ("mixed", Plan),
        ("decode", Plan),
    )


STRUCTS = {"op": Op, "mark": Mark, "binding": Binding, "fault": Fault, "plan": Plan}


def query(path: Path, version: int = VERSION) -> Driver | None:
    """The object stays loaded."""
    function = ctypes.CDLL(str(path)).glm_driver_query
    function.restype = ctypes.POINTER(Driver)
    found = function(ctypes.c_uint32(version))
    return found.contents if found else None
