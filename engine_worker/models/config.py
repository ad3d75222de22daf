"""What config.json says about a GLM-4.5, 4.5-Air, 4.6 or 4.7 model; every value that matters must be there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine_worker.errors import CheckpointError, UnsupportedError
from engine_worker.models.config_fields import ConfigFields
from engine_worker.models.quantization import Quantization, read_quantization
from engine_worker.weights.strict_json import read_json_object

ARCHITECTURE = "Glm4MoeForCausalLM"
MAX_EXPERTS_PER_TOKEN = 32  # glm_moe_route_args
_MAX = 2**31 - 1

ActivationDtype = Literal["bf16", "f32"]
# An FP16 checkpoint runs on f32 activations: they hold every FP16 value and do not overflow.
_ACTIVATION_DTYPES: Mapping[str, ActivationDtype] = {"bfloat16": "bf16", "float16": "f32", "float32": "f32"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The names are config.json's, except where a comment says otherwise."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int  # MTP layers after the last one; also spelled num_mtp_layers
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    activation_dtype: ActivationDtype  # from dtype or torch_dtype

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    use_qk_norm: bool
    attention_bias: bool
    rotary_dim: int  # head_dim * partial_rotary_factor
    rope_theta: float

    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    quantization: Quantization | None
    eos_token_ids: tuple[int, ...]  # from generation_config.json, else config.json


def read_model_config(directory: Path) -> tuple[ModelConfig, bytes]:
    """Parse `directory`/config.json; also returns the file's bytes.

    Raises CheckpointError for a missing or wrong key (naming it and the file), UnsupportedError for a model that this
    engine does not implement.
    """
    path = directory / "config.json"
    values, data = read_json_object(path)
    fields = ConfigFields(path, values)
    _check_architecture(fields)
    config = _read_fields(fields, _read_eos(directory, fields))
    _check_consistency(path, config)
    return config, data


def _check_architecture(fields: ConfigFields) -> None:
    architectures = fields.get("architectures")
    if architectures != [ARCHITECTURE]:
        names = ", ".join(map(repr, architectures)) if isinstance(architectures, list) else repr(architectures)
        raise UnsupportedError(
            f"{fields.path}: architecture {names} is not supported; "
            f"supported: {ARCHITECTURE} (GLM-4.5, 4.5-Air, 4.6, 4.7)"
        )
    fields.choice("hidden_act", ("silu",))


def _read_fields(f: ConfigFields, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    dtype = f.choice(f.spelling("dtype", "torch_dtype"), tuple(_ACTIVATION_DTYPES))
    head_dim = f.integer("head_dim", 2, 1024)
    rope_theta, partial_rotary_factor = _read_rope(f)
    return ModelConfig(
        vocab_size=f.integer("vocab_size", 1, _MAX),
        hidden_size=f.integer("hidden_size", 1, _MAX),
        num_hidden_layers=f.integer("num_hidden_layers", 1, 10_000),
        num_nextn_predict_layers=f.integer(f.spelling("num_nextn_predict_layers", "num_mtp_layers"), 0, 100),
        rms_norm_eps=f.number("rms_norm_eps", 0.0, 1.0),
        max_position_embeddings=f.integer("max_position_embeddings", 1, _MAX),
        tie_word_embeddings=f.boolean("tie_word_embeddings"),
        activation_dtype=_ACTIVATION_DTYPES[dtype],
        num_attention_heads=f.integer("num_attention_heads", 1, 100_000),
        num_key_value_heads=f.integer("num_key_value_heads", 1, 100_000),
        head_dim=head_dim,
        use_qk_norm=f.boolean("use_qk_norm"),
        attention_bias=f.boolean("attention_bias"),
        rotary_dim=int(head_dim * partial_rotary_factor),
        rope_theta=rope_theta,
        intermediate_size=f.integer("intermediate_size", 1, _MAX),
        first_k_dense_replace=f.integer("first_k_dense_replace", 0, 10_000),
        moe_intermediate_size=f.integer("moe_intermediate_size", 1, _MAX),
        n_routed_experts=f.integer("n_routed_experts", 1, 100_000),
        n_shared_experts=f.integer("n_shared_experts", 0, 1000),
        num_experts_per_tok=f.integer("num_experts_per_tok", 1, MAX_EXPERTS_PER_TOKEN),
        n_group=f.integer("n_group", 1, 100_000),
        topk_group=f.integer("topk_group", 1, 100_000),
        norm_topk_prob=f.boolean("norm_topk_prob"),
        routed_scaling_factor=f.number("routed_scaling_factor", 0.0, sys.float_info.max),
        quantization=read_quantization(f),
        eos_token_ids=eos_token_ids,
    )


def _read_rope(f: ConfigFields) -> tuple[float, float]:
    """theta and partial_rotary_factor, from `rope_parameters` (transformers 5) or from the top level."""
    most = sys.float_info.max
    scaling = f.get("rope_scaling", None)
    rope = f
    if "rope_parameters" in f:
        rope = f.section("rope_parameters")
        scaling = scaling or rope.get("rope_type")
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in f and key in rope and f.get(key) != rope.get(key):
                raise CheckpointError(
                    f"{f.path}: {key} = {f.get(key)!r} and rope_parameters.{key} = {rope.get(key)!r} disagree"
                )
    elif "rope_scaling" not in f:
        f.get("rope_scaling")
    if scaling not in (None, "default"):
        raise UnsupportedError(f"{f.path}: rope scaling {scaling!r} is not supported; supported: none (null)")
    factor = rope if "partial_rotary_factor" in rope else f
    return rope.number("rope_theta", 1.0, most), factor.number("partial_rotary_factor", 0.0, 1.0)


def _read_eos(directory: Path, config: ConfigFields) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    sources = [ConfigFields(path, read_json_object(path)[0])] if path.exists() else []
    for fields in (*sources, config):
        value = fields.get("eos_token_id", None)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        vocab = config.integer("vocab_size", 1, _MAX)
        if not ids or not all(type(token) is int and 0 <= token < vocab for token in ids):
            raise CheckpointError(f"{fields.path}: eos_token_id: {value!r}, expected token ids from 0 to {vocab - 1}")
        return tuple(ids)
    raise CheckpointError(f"{config.path}: key eos_token_id is missing, here and in {path}")


def _check_consistency(path: Path, c: ModelConfig) -> None:
    """What no key says on its own."""
    group_size = c.n_routed_experts // c.n_group
    rules = (
        (
            "num_attention_heads",
            c.num_attention_heads % c.num_key_value_heads == 0,
            "a multiple of num_key_value_heads",
        ),
        ("partial_rotary_factor", c.rotary_dim > 0 and c.rotary_dim % 2 == 0, "to turn an even number of head_dim"),
        ("n_group", c.n_routed_experts % c.n_group == 0, "a divisor of n_routed_experts"),
        ("n_group", c.n_group == 1 or group_size >= 2, "groups of two experts or more"),
        ("topk_group", c.topk_group <= c.n_group, "at most n_group"),
        (
            "num_experts_per_tok",
            c.num_experts_per_tok <= group_size * c.topk_group,
            "at most what topk_group groups hold",
        ),
        ("first_k_dense_replace", c.first_k_dense_replace <= c.num_hidden_layers, "at most num_hidden_layers"),
    )
    for key, holds, expected in rules:
        if not holds:
            value = getattr(c, key, f"{c.rotary_dim} of {c.head_dim} dims")
            raise CheckpointError(f"{path}: {key}: {value}, expected {expected}")
