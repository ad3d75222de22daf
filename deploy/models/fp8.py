"""FP8 E4M3 with one scale per output channel, as compressed-tensors' float-quantized form stores it."""

import ml_dtypes
import numpy as np
import numpy.typing as npt

FP8_MAX = 448.0

Float32 = npt.NDArray[np.float32]


def quantize_channels(weight: Float32) -> tuple[npt.NDArray[np.generic], Float32]:
    """[out, in] f32 -> ([out, in] float8_e4m3fn, [out, 1] f32 scale) with weight ~ fp8 * scale, to nearest even.

    A row's scale is absmax / 448, so that its largest element encodes to +-448. A row of zeros, or one so small that
    this scale would be subnormal, is stored as zeros with scale 1.
    """
    if not np.isfinite(weight).all():
        raise ValueError("cannot quantise a weight that holds NaN or infinity")
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(FP8_MAX)
    scale = np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1))
    return (weight / scale).astype(ml_dtypes.float8_e4m3fn), scale
