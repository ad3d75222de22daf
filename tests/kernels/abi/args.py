"""Mirror of the args structs in ops.h and exchange.h."""

import ctypes as c

from tests.kernels.abi.types import ENUM, MAX_PARTS, ExpertWeights, KvLayer, Op, Slots, StepInputs, Tensor, Weight


class EmbedArgs(c.Structure):
    _fields_ = [
        ("rows", c.c_int32),
        ("step", c.POINTER(StepInputs)),
        ("slots", c.POINTER(Slots)),
        ("table", Weight),
        ("format", ENUM),
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
        ("format", ENUM),
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
        ("format", ENUM),
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
