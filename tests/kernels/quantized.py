"""What a fused FP8 output must be: that of quantising the operation's own act output."""

from typing import Any

import numpy as np

from tests.kernels import abi
from tests.kernels.harness import F32, FP8, Array, BoundTensor, output


def scale_cols(cols: int, grouped: bool) -> int:
    return -(-cols // abi.FP8_BLOCK) if grouped else 1


def outputs(rows: int, cols: int, grouped: bool) -> tuple[BoundTensor, BoundTensor]:
    """Poisoned q and scale."""
    groups = scale_cols(cols, grouped)
    return output(rows, cols, FP8, cols + 9), output(rows, groups, F32, groups + 2)


def assert_quantized(q: Array, scale: Array, x: Array) -> None:
    """scale is absmax / 448 of each group of x (1 for zeros), q the nearest FP8 value of x / scale."""
    rows, cols = x.shape
    groups = scale.shape[1]
    width = cols if groups == 1 else abi.FP8_BLOCK
    exact = x.astype(np.float64)
    for group in range(groups):
        span = slice(group * width, min(cols, (group + 1) * width))
        absmax = np.abs(exact[:, span]).max(axis=1) if rows else np.zeros(0)
        expected = np.where(absmax == 0, 1.0, absmax / abi.FP8_MAX)
        np.testing.assert_allclose(scale[:, group], expected, rtol=1e-6)
        ratio = x[:, span].astype(np.float32) / scale[:, group : group + 1]
        nearest: np.ndarray[Any, Any] = ratio.astype(FP8)
        assert q[:, span].tobytes() == nearest.tobytes()
