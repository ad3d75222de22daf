# mypy: disable-error-code="import-not-found"
"""FP8 linear layers on top of torch, as the checkpoints define them: needed by make_checkpoints.py only.

Weights are E4M3 times a scale per output channel or per 128x128 block; activations are quantised as they come, one
scale per token or per 128 columns of a token. Products and sums are f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
FP8_MAX = 448.0


@dataclass(frozen=True)
class QuantizedWeight:
    """w = codes.float() * scale, the scale spread over its channel or block."""

    codes: Tensor  # [out][in] float8_e4m3fn
    scale: Tensor  # [out][1] or [ceil(out/128)][ceil(in/128)], in the checkpoint's dtype
    dequantized: Tensor  # [out][in] f32


def quantize_weight(weight: Tensor, scheme: str, scale_dtype: torch.dtype) -> QuantizedWeight:
    rows, cols = weight.shape
    if scheme == "channel":
        absmax = weight.abs().amax(dim=1, keepdim=True)
        scale = _scale(absmax).to(scale_dtype)
        spread = scale.float().expand(rows, cols)
    else:
        padded = functional.pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
        scale = _scale(blocks.abs().amax(dim=(1, 3))).to(scale_dtype)
        spread = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    codes = (weight / spread).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scale, codes.float() * spread)


def quantize_activation(x: Tensor, scheme: str) -> Tensor:
    """x [..., cols] after a round trip through FP8, as f32."""
    x = x.float()
    cols = x.shape[-1]
    group = cols if scheme == "channel" else BLOCK
    padded = functional.pad(x, (0, -cols % group)).unflatten(-1, (-1, group))
    scale = _scale(padded.abs().amax(dim=-1, keepdim=True))
    codes = (padded / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)[..., :cols]


def _scale(absmax: Tensor) -> Tensor:
    scale = absmax / FP8_MAX
    return torch.where(scale == 0, torch.ones_like(scale), scale)


@contextmanager
def fp8_linears(weights: list[Tensor], scheme: str) -> Iterator[None]:
    """Inside, functional.linear with one of `weights` (f32), or a slice of one, quantises its input first."""
    quantized = {weight.untyped_storage().data_ptr() for weight in weights}
    plain = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() not in quantized:
            return plain(x, weight, bias)
        out = plain(quantize_activation(x, scheme), weight, None if bias is None else bias.float())
        return out.to(x.dtype)

    functional.linear = linear
    try:
        yield
    finally:
        functional.linear = plain
