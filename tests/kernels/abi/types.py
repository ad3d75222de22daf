"""Mirror of types.h, and of glm_op in ops.h."""

import ctypes as c
import enum

PAGE_SIZE = 16
MAX_PARTS = 4
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
FP8_MAX = 448.0
FP8_BLOCK = 128


class Status(enum.IntEnum):
    OK = 0
    INVALID_ARGUMENT = 1
    UNSUPPORTED = 2
    BAD_CHECKPOINT = 3
    OUT_OF_MEMORY = 4
    DEVICE_ERROR = 5
    INTERNAL = 6


class Dtype(enum.IntEnum):
    F32 = 0
    BF16 = 1
    F16 = 2
    FP8_E4M3 = 3
    I32 = 4
    U16 = 5


class WeightFormat(enum.IntEnum):
    F32 = 0
    BF16 = 1
    F16 = 2
    FP8_CHANNEL = 3
    FP8_BLOCK = 4


class Op(enum.IntEnum):
    EMBED = 0
    RMS_NORM = 1
    QUANTIZE = 2
    LINEAR = 3
    QK_NORM_ROPE_STORE = 4
    PAGED_ATTENTION = 5
    SILU_MUL = 6
    MOE_ROUTE = 7
    MOE_GROUP = 8
    MOE_GATE_UP = 9
    MOE_DOWN = 10
    ALL_REDUCE = 11
    GATHER_ROWS = 12
    SAMPLE = 13
    REDUCE_SCATTER = 14
    ALL_GATHER = 15
    MOE_DISPATCH = 16
    MOE_DOWN_EACH = 17
    MOE_COMBINE = 18
    COUNT = 19


# C enums without negative enumerators.
ENUM = c.c_uint


class DeviceOptions(c.Structure):
    _fields_ = [("ordinal", c.c_int32), ("num_threads", c.c_int32)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", ENUM), ("cols", c.c_int32), ("stride", c.c_int64)]


class Weight(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("stride", c.c_int64),
        ("scale", c.c_void_p),
        ("scale_stride", c.c_int64),
        ("rows", c.c_int32),
    ]


class ExpertWeights(c.Structure):
    _fields_ = [
        ("experts", c.c_void_p),
        ("format", ENUM),
        ("first", c.c_int32),
        ("count", c.c_int32),
        ("rows", c.c_int32),
        ("cols", c.c_int32),
    ]


class KvLayer(c.Structure):
    _fields_ = [
        ("k", c.c_void_p),
        ("v", c.c_void_p),
        ("dtype", ENUM),
        ("kv_heads", c.c_int32),
        ("head_dim", c.c_int32),
    ]


class Sampling(c.Structure):
    _fields_ = [
        ("seed", c.c_uint64),
        ("temperature", c.c_float),
        ("top_p", c.c_float),
        ("min_p", c.c_float),
        ("repetition_penalty", c.c_float),
        ("frequency_penalty", c.c_float),
        ("presence_penalty", c.c_float),
        ("top_k", c.c_int32),
        ("min_tokens", c.c_int32),
        ("prompt_len", c.c_int32),
        ("num_logprobs", c.c_int32),
        ("num_stop_ids", c.c_int32),
        ("num_bias", c.c_int32),
        ("stop_ids", c.c_int32 * MAX_STOP_IDS),
        ("bias_ids", c.c_int32 * MAX_LOGIT_BIAS),
        ("bias_values", c.c_float * MAX_LOGIT_BIAS),
    ]


class Slots(c.Structure):
    _fields_ = [
        ("sampling", c.c_void_p),
        ("last_token", c.c_void_p),
        ("page_table", c.c_void_p),
        ("counts", c.c_void_p),
        ("max_slots", c.c_int32),
        ("max_pages", c.c_int32),
        ("vocab", c.c_int32),
    ]


class StepInputs(c.Structure):
    _fields_ = [
        ("num_rows", c.c_int32),
        ("num_seqs", c.c_int32),
        ("num_samples", c.c_int32),
        ("token_ids", c.c_void_p),
        ("positions", c.c_void_p),
        ("row_slots", c.c_void_p),
        ("seq_slots", c.c_void_p),
        ("seq_starts", c.c_void_p),
        ("sample_rows", c.c_void_p),
        ("sample_slots", c.c_void_p),
        ("out_token_ids", c.c_void_p),
        ("out_logprobs", c.c_void_p),
        ("out_top_ids", c.c_void_p),
        ("out_top_logprobs", c.c_void_p),
        ("sample_masks", c.c_void_p),
        ("forced_tokens", c.c_void_p),
        ("masks", c.c_void_p),
    ]


class PageUpdate(c.Structure):
    _fields_ = [("slot", c.c_int32), ("index", c.c_int32), ("page", c.c_int32)]
