"""FP8 checkpoints as f32 ones, whose activations nobody quantises: what quantising costs is told against them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine_worker.runtime.records import TensorSource
from engine_worker.weights.safetensors_index import read_checkpoint

_DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def dequantize(source: Path, target: Path) -> Path:
    """Write the checkpoint in `source`, which has a scale per output channel, to `target` with f32 weights."""
    target.mkdir()
    tensors = {name: _read(tensor) for name, tensor in read_checkpoint(source).tensors.items()}
    for scale in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[scale.removesuffix("_scale")] *= tensors.pop(scale)
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


def _read(tensor: TensorSource) -> NDArray[np.float32]:
    assert tensor.path is not None
    data = np.memmap(tensor.path, np.uint8, "r", tensor.offset, tensor.nbytes)
    values: NDArray[np.float32] = data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape).astype(np.float32)
    return values
