"""ctypes mirror of kernels.h and ops.h in kernels/include/glm; test_header_layout.py holds it against C's layout."""

import ctypes as c
import enum

VERSION = 4
PAGE_SIZE = 16
MAX_RANKS = 64
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
_ENUM = c.c_uint


class DeviceOptions(c.Structure):
    _fields_ = [("ordinal", c.c_int32), ("num_threads", c.c_int32)]


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p), ("dtype", _ENUM), ("cols", c.c_int32), ("stride", c.c_int64)]


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
        ("format", _ENUM),
        ("first", c.c_int32),
        ("count", c.c_int32),
        ("rows", c.c_int32),
        ("cols", c.c_int32),
    ]


class KvLayer(c.Structure):
    _fields_ = [
        ("k", c.c_void_p),
        ("v", c.c_void_p),
        ("dtype", _ENUM),
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


class EmbedArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("step", c.POINTER(StepInputs)),
        ("slots", c.POINTER(Slots)),
        ("table", Weight),
        ("format", _ENUM),
        ("out", Tensor),
    ]


class RmsNormArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("residual", Tensor),
        ("delta", Tensor),
        ("weight", c.c_void_p),
        ("eps", c.c_float),
        ("out", Tensor),
        ("q", Tensor),
        ("scale", Tensor),
        ("reduce", c.c_int32),
    ]


class QuantizeArgs(c.Structure):
    _fields_ = [("rows", c.c_int32), ("x", Tensor), ("q", Tensor), ("scale", Tensor)]


class LinearArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("num_parts", c.c_int32),
        ("format", _ENUM),
        ("x", Tensor),
        ("x_scale", Tensor),
        ("parts", Weight * MAX_PARTS),
        ("bias", c.c_void_p * MAX_PARTS),
        ("out", Tensor),
    ]


class QkNormRopeStoreArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("step", c.POINTER(StepInputs)),
        ("slots", c.POINTER(Slots)),
        ("qkv", Tensor),
        ("q_norm", c.c_void_p),
        ("k_norm", c.c_void_p),
        ("eps", c.c_float),
        ("heads", c.c_int32),
        ("rotary_dim", c.c_int32),
        ("rope_cos", c.c_void_p),
        ("rope_sin", c.c_void_p),
        ("kv", KvLayer),
        ("out", Tensor),
    ]


class PagedAttentionArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("step", c.POINTER(StepInputs)),
        ("slots", c.POINTER(Slots)),
        ("q", Tensor),
        ("kv", KvLayer),
        ("heads", c.c_int32),
        ("softmax_scale", c.c_float),
        ("out", Tensor),
    ]


class SiluMulArgs(c.Structure):
    _fields_ = [("rows", c.c_int32), ("x", Tensor), ("out", Tensor), ("q", Tensor), ("scale", Tensor)]


class MoeRouteArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("x", Tensor),
        ("weight", Weight),
        ("format", _ENUM),
        ("bias", c.c_void_p),
        ("experts", c.c_int32),
        ("top_k", c.c_int32),
        ("groups", c.c_int32),
        ("topk_groups", c.c_int32),
        ("normalize", c.c_int32),
        ("scale", c.c_float),
        ("ids", Tensor),
        ("weights", Tensor),
        ("places", c.c_void_p),
    ]


class MoeGroupArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("ids", Tensor),
        ("top_k", c.c_int32),
        ("first", c.c_int32),
        ("count", c.c_int32),
        ("offsets", c.c_void_p),
        ("order", c.c_void_p),
        ("loads", c.c_void_p),
        ("step", c.POINTER(StepInputs)),
        ("spare_slot", c.c_int32),
    ]


class MoeGateUpArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("top_k", c.c_int32),
        ("x", Tensor),
        ("x_scale", Tensor),
        ("gate", ExpertWeights),
        ("up", ExpertWeights),
        ("offsets", c.c_void_p),
        ("order", c.c_void_p),
        ("out", Tensor),
        ("q", Tensor),
        ("scale", Tensor),
    ]


class MoeDownArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("top_k", c.c_int32),
        ("x", Tensor),
        ("x_scale", Tensor),
        ("down", ExpertWeights),
        ("offsets", c.c_void_p),
        ("order", c.c_void_p),
        ("ids", Tensor),
        ("weights", Tensor),
        ("base", Tensor),
        ("out", Tensor),
    ]


class AllReduceArgs(c.Structure):
    _fields_ = [("rows", c.c_int32), ("x", Tensor)]


class ReduceScatterArgs(c.Structure):
    _fields_ = [("rows", c.c_int32), ("x", Tensor)]


class AllGatherArgs(c.Structure):
    _fields_ = [("rows", c.c_int32), ("x", Tensor)]


class MoeDispatchArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("top_k", c.c_int32),
        ("first", c.c_int32),
        ("count", c.c_int32),
        ("ids", Tensor),
        ("x", Tensor),
        ("x_scale", Tensor),
    ]


class MoeDownEachArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("top_k", c.c_int32),
        ("x", Tensor),
        ("x_scale", Tensor),
        ("down", ExpertWeights),
        ("offsets", c.c_void_p),
        ("order", c.c_void_p),
        ("out", Tensor),
    ]


class MoeCombineArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("top_k", c.c_int32),
        ("count", c.c_int32),
        ("ids", Tensor),
        ("weights", Tensor),
        ("products", Tensor),
        ("base", Tensor),
        ("out", Tensor),
    ]


class GatherRowsArgs(c.Structure):
    _fields_ = [("rows", c.c_int32), ("step", c.POINTER(StepInputs)), ("x", Tensor), ("out", Tensor)]


class SampleArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("step", c.POINTER(StepInputs)),
        ("slots", c.POINTER(Slots)),
        ("logits", Tensor),
        ("first", c.c_int32),
    ]


class PageUpdate(c.Structure):
    _fields_ = [("slot", c.c_int32), ("index", c.c_int32), ("page", c.c_int32)]


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


OP_ARGS: dict[Op, type[c.Structure]] = {
    Op.EMBED: EmbedArgs,
    Op.RMS_NORM: RmsNormArgs,
    Op.QUANTIZE: QuantizeArgs,
    Op.LINEAR: LinearArgs,
    Op.QK_NORM_ROPE_STORE: QkNormRopeStoreArgs,
    Op.PAGED_ATTENTION: PagedAttentionArgs,
    Op.SILU_MUL: SiluMulArgs,
    Op.MOE_ROUTE: MoeRouteArgs,
    Op.MOE_GROUP: MoeGroupArgs,
    Op.MOE_GATE_UP: MoeGateUpArgs,
    Op.MOE_DOWN: MoeDownArgs,
    Op.ALL_REDUCE: AllReduceArgs,
    Op.GATHER_ROWS: GatherRowsArgs,
    Op.SAMPLE: SampleArgs,
    Op.REDUCE_SCATTER: ReduceScatterArgs,
    Op.ALL_GATHER: AllGatherArgs,
    Op.MOE_DISPATCH: MoeDispatchArgs,
    Op.MOE_DOWN_EACH: MoeDownEachArgs,
    Op.MOE_COMBINE: MoeCombineArgs,
}
