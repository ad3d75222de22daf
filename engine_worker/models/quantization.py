"""Which FP8 scheme a config.json declares. Which weights it covers, the tensors say: weights/manifest.py."""

from __future__ import annotations

from typing import Literal

from engine_worker.errors import CheckpointError, UnsupportedError
from engine_worker.models.config_fields import ConfigFields
from engine_worker.weights.records import FP8_BLOCK, WeightFormat

# channel: a scale per output channel of a weight and per token of an activation; block: per 128x128 weight block and
# per 128 columns of a token.
Quantization = Literal["channel", "block"]


def fp8_format(quantization: Quantization | None) -> WeightFormat | None:
    """Of the weights that the scheme covers."""
    formats = {"channel": WeightFormat.FP8_CHANNEL, "block": WeightFormat.FP8_BLOCK}
    return None if quantization is None else formats[quantization]


def read_quantization(fields: ConfigFields) -> Quantization | None:
    """The scheme of `quantization_config`, None if there is none. Raises UnsupportedError for all others, by name."""
    if fields.get("quantization_config", None) is None:
        return None
    quantization = fields.section("quantization_config")
    if quantization.choice("quant_method", ("compressed-tensors", "fp8")) == "fp8":
        return _read_fp8_method(quantization)
    quantization.choice("format", ("float-quantized",))
    if quantization.get("kv_cache_scheme", None) is not None:
        _check_fp8(quantization.section("kv_cache_scheme"))
    schemes = {_read_group(group) for group in quantization.sections("config_groups")}
    if len(schemes) != 1:
        found = " and ".join(sorted(schemes)) or "none"
        raise CheckpointError(f"{fields.path}: quantization_config.config_groups: expected one scheme, found {found}")
    return schemes.pop()


def _read_fp8_method(quantization: ConfigFields) -> Quantization:
    """The DeepSeek-style spelling of block scales."""
    quantization.choice("activation_scheme", ("dynamic",))
    _check_value(quantization, "weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    return "block"


def _read_group(group: ConfigFields) -> Quantization:
    weights, activations = group.section("weights"), group.section("input_activations")
    for tensor, dynamic in ((weights, False), (activations, True)):
        _check_fp8(tensor)
        _check_value(tensor, "dynamic", dynamic)
    if weights.choice("strategy", ("channel", "block")) == "channel":
        activations.choice("strategy", ("token",))
        return "channel"
    _check_value(weights, "block_structure", [FP8_BLOCK, FP8_BLOCK])
    activations.choice("strategy", ("group",))
    _check_value(activations, "group_size", FP8_BLOCK)
    return "block"


def _check_fp8(tensor: ConfigFields) -> None:
    _check_value(tensor, "num_bits", 8)
    _check_value(tensor, "type", "float")
    _check_value(tensor, "symmetric", True)


def _check_value(fields: ConfigFields, key: str, supported: object) -> None:
    value = fields.get(key)
    if value != supported:
        raise UnsupportedError(
            f"{fields.path}: {fields.prefix}{key} {value!r} is not supported; supported: {supported!r}"
        )
