"""Structs and constants of native/include/glm/runtime.h and kernels.h, as ctypes lays them out."""

from __future__ import annotations

import ctypes

RUNTIME_VERSION = 7
PAGE_SIZE = 16
MAX_STOP_IDS = 64
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_IN_FLIGHT = 2
MAX_DIMS = 4
MAX_RANKS = 64
PLAN_MIXED, PLAN_DECODE = 0, 1


class CError(ctypes.Structure):
    _fields_ = (("message", ctypes.c_char * 1024),)


class CTensorSource(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("path", ctypes.c_char_p),
        ("offset", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("dtype", ctypes.c_char_p),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("seed", ctypes.c_uint64),
        ("mean", ctypes.c_float),
        ("spread", ctypes.c_float),
    )


CProgress = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


class CRankOptions(ctypes.Structure):
    _fields_ = (
        ("device_ordinal", ctypes.c_int32),
        ("mixed_plan", ctypes.c_char_p),
        ("decode_plan", ctypes.c_char_p),
        ("driver_path", ctypes.c_char_p),
    )


class CEngineOptions(ctypes.Structure):
    _fields_ = (
        ("kernels_path", ctypes.c_char_p),
        ("num_threads", ctypes.c_int32),
        ("ranks", ctypes.POINTER(CRankOptions)),
        ("num_ranks", ctypes.c_int32),
        ("tensors", ctypes.POINTER(CTensorSource)),
        ("num_tensors", ctypes.c_int32),
        ("max_rows", ctypes.c_int32),
        ("max_samples", ctypes.c_int32),
        ("max_slots", ctypes.c_int32),
        ("max_context", ctypes.c_int32),
        ("num_pages", ctypes.c_int32),
        ("fit_pages", ctypes.c_int32),
        ("random_kv", ctypes.c_int32),
        ("progress", CProgress),
        ("progress_context", ctypes.c_void_p),
    )


class CEngineProgress(ctypes.Structure):
    _fields_ = (("calls", ctypes.c_uint64), ("where", ctypes.c_char * 1024))


class CEngineInfo(ctypes.Structure):
    _fields_ = (
        ("kernels", ctypes.c_char * 32),
        ("device", ctypes.c_char * 128),
        ("weight_bytes_mapped", ctypes.c_uint64),
        ("weight_bytes_copied", ctypes.c_uint64),
        ("kv_bytes", ctypes.c_uint64),
        ("scratch_bytes", ctypes.c_uint64),
        ("num_pages", ctypes.c_int32),
        ("max_slots", ctypes.c_int32),
        ("max_context", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("steps_run", ctypes.c_uint64),
    )


class CSampling(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("min_p", ctypes.c_float),
        ("repetition_penalty", ctypes.c_float),
        ("frequency_penalty", ctypes.c_float),
        ("presence_penalty", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("min_tokens", ctypes.c_int32),
        ("prompt_len", ctypes.c_int32),
        ("num_logprobs", ctypes.c_int32),
        ("num_stop_ids", ctypes.c_int32),
        ("num_bias", ctypes.c_int32),
        ("stop_ids", ctypes.c_int32 * MAX_STOP_IDS),
        ("bias_ids", ctypes.c_int32 * MAX_LOGIT_BIAS),
        ("bias_values", ctypes.c_float * MAX_LOGIT_BIAS),
    )


class CPageUpdate(ctypes.Structure):
    _fields_ = (("slot", ctypes.c_int32), ("index", ctypes.c_int32), ("page", ctypes.c_int32))


class CStepBatch(ctypes.Structure):
    _fields_ = (
        ("num_rows", ctypes.c_int32),
        ("num_seqs", ctypes.c_int32),
        ("num_samples", ctypes.c_int32),
        ("num_page_updates", ctypes.c_int32),
        ("plan", ctypes.c_int),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("seq_slots", ctypes.c_void_p),
        ("seq_starts", ctypes.c_void_p),
        ("sample_rows", ctypes.c_void_p),
        ("page_updates", ctypes.c_void_p),
        ("forced_tokens", ctypes.c_void_p),
        ("sample_masks", ctypes.c_void_p),
        ("num_masks", ctypes.c_int32),
    )


class CStepResult(ctypes.Structure):
    _fields_ = (
        ("num_samples", ctypes.c_int32),
        ("token_ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
        ("device_ns", ctypes.c_uint64),
    )
