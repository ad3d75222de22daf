"""Mirror of the table in kernels.h."""

import ctypes as c

from tests.kernels.abi.types import DeviceOptions, Op, Slots

VERSION = 4
MAX_RANKS = 64
HOST_MEMORY = 1  # of Kernels.flags

_OP = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p)
_CALL = c.CFUNCTYPE(c.c_int, c.c_void_p)
_FREE = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p)
_END = c.CFUNCTYPE(None, c.c_void_p)
_ALLOC = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_size_t, c.POINTER(c.c_void_p))
_COPY = c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.c_size_t)
_MAKE = c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_void_p))


class Kernels(c.Structure):
    _fields_ = [
        ("version", c.c_uint32),
        ("name", c.c_char_p),
        ("flags", c.c_uint32),
        (
            "device_open",
            c.CFUNCTYPE(c.c_int, c.POINTER(DeviceOptions), c.POINTER(c.c_void_p), c.c_char_p, c.c_size_t),
        ),
        ("device_close", c.CFUNCTYPE(None, c.c_void_p)),
        ("device_description", c.CFUNCTYPE(c.c_char_p, c.c_void_p)),
        ("workspace_bytes", c.CFUNCTYPE(c.c_size_t, c.c_void_p, c.c_int, c.c_void_p)),
        ("set_workspace", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_size_t)),
        ("last_error", c.CFUNCTYPE(c.c_char_p, c.c_void_p)),
        ("memory_info", c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_size_t), c.POINTER(c.c_size_t))),
        ("memory_alloc", _ALLOC),
        ("memory_free", _OP),
        ("host_alloc", _ALLOC),
        ("host_free", _OP),
        ("copy_in", _COPY),
        ("copy_out", _COPY),
        ("fill", c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_uint8, c.c_size_t)),
        ("update_pages", c.CFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(Slots), c.c_void_p, c.c_int32)),
        ("synchronize", _CALL),
        ("event_create", _MAKE),
        ("event_destroy", _FREE),
        ("event_record", _OP),
        ("event_wait", _OP),
        ("event_elapsed", c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p, c.c_void_p, c.POINTER(c.c_uint64))),
        ("graph_begin", _CALL),
        ("graph_end", _MAKE),
        ("graph_launch", _OP),
        ("graph_free", _FREE),
        (
            "group_create",
            c.CFUNCTYPE(c.c_int, c.POINTER(c.c_void_p), c.c_int32, c.POINTER(c.c_void_p), c.c_char_p, c.c_size_t),
        ),
        ("group_abort", _END),
        ("group_destroy", _END),
        *((op.name.lower(), _OP) for op in list(Op)[: Op.COUNT]),
        ("group_progress", c.CFUNCTYPE(None, c.c_void_p, c.POINTER(c.c_uint64))),
    ]
