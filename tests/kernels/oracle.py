"""float64 NumPy oracles of the row-wise operations and attention, rounded to act where the contract says so."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels.harness import Array, F64Array

Dtype = np.dtype[Any]


def round_to(values: npt.NDArray[Any], dtype: Dtype) -> F64Array:
    return values.astype(np.float32).astype(dtype).astype(np.float64)


def normalize(x: F64Array, weight: F64Array, eps: float, act: Dtype) -> F64Array:
    """weight * act(x / sqrt(mean(x^2) + eps)) over the last axis, rounded to act."""
    scale = 1.0 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + eps)
    return round_to(weight * round_to(x * scale, act), act)


def add_residual(residual: Array, delta: Array | None) -> Array:
    """act(residual + delta), exactly: the sum in f32, then one rounding."""
    if delta is None:
        return residual
    total: Array = (residual.astype(np.float32) + delta.astype(np.float32)).astype(residual.dtype)
    return total


def silu_mul(x: Array) -> F64Array:
    n = x.shape[1] // 2
    gate, up = x[:, :n].astype(np.float64), x[:, n:].astype(np.float64)
    with np.errstate(over="ignore"):
        silu = gate / (1.0 + np.exp(-gate))
    return round_to(round_to(silu, x.dtype) * up, x.dtype)


def rope(x: F64Array, positions: npt.NDArray[np.int32], cos: Array, sin: Array) -> F64Array:
    """Rotate-half on the first 2 * cos.shape[1] dims of x [rows][heads][head_dim]."""
    half = cos.shape[1]
    c, s = cos[positions][:, None, :].astype(np.float64), sin[positions][:, None, :].astype(np.float64)
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([low * c - high * s, high * c + low * s, rest], axis=-1)


def rope_tables(positions: int, rotary_dim: int, theta: float = 1e4) -> tuple[Array, Array]:
    inverse = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(positions)[:, None] * inverse[None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def attention(q: Array, k: Array, v: Array, positions: npt.NDArray[np.int32], scale: float) -> F64Array:
    """q [rows][heads][dim] of one sequence against k, v [kv_heads][keys][dim]; row t sees keys 0..positions[t]."""
    rows, heads, _ = q.shape
    kv_heads, keys, _ = k.shape
    group = heads // kv_heads
    out = np.empty(q.shape, np.float64)
    mask = np.arange(keys)[None, :] > positions[:, None]
    for head in range(heads):
        scores = q[:, head].astype(np.float64) @ k[head // group].astype(np.float64).T * scale
        scores[mask] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[:, head] = weights @ v[head // group].astype(np.float64)
    assert rows == len(positions)
    return out
