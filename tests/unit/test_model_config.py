"""config.json decides everything: each key is read, required and checked, in both spellings."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from engine_worker.errors import CheckpointError, UnsupportedError
from engine_worker.models.config import ModelConfig, read_model_config
from tests.golden.cases import BASE
from tests.unit.checkpoint_files import CHANNEL_QUANTIZATION

GLM_47: dict[str, Any] = BASE | {
    "dtype": "bfloat16",
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1000000,
    "vocab_size": 151552,
    "quantization_config": CHANNEL_QUANTIZATION,
}
AIR_45: dict[str, Any] = GLM_47 | {
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_hidden_layers": 46,
    "routed_scaling_factor": 1.0,
    "use_qk_norm": False,
    "quantization_config": None,
}


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(directory)[0]


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_glm_47(tmp_path: Path) -> None:
    assert read(tmp_path, GLM_47) == ModelConfig(
        vocab_size=151552,
        hidden_size=5120,
        num_hidden_layers=92,
        num_nextn_predict_layers=1,
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
        tie_word_embeddings=False,
        activation_dtype="bf16",
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        use_qk_norm=True,
        attention_bias=True,
        rotary_dim=64,
        rope_theta=1e6,
        intermediate_size=12288,
        first_k_dense_replace=3,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        quantization="channel",
        eos_token_ids=(151329, 151336, 151338),
    )


def test_glm_45_air(tmp_path: Path) -> None:
    config = read(tmp_path, AIR_45)
    assert (config.use_qk_norm, config.routed_scaling_factor, config.quantization) == (False, 1.0, None)


def test_newer_spellings_mean_the_same(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    newer = without(GLM_47, "rope_theta", "rope_scaling", "partial_rotary_factor", "dtype", "num_nextn_predict_layers")
    newer |= {"rope_parameters": rope, "torch_dtype": "bfloat16", "num_mtp_layers": 1}
    assert read(tmp_path, newer) == read(tmp_path, GLM_47)


def test_spellings_that_disagree(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"spellings of dtype disagree: dtype = 'bfloat16', torch_dtype = 'float32'"
    ):
        read(tmp_path, GLM_47 | {"torch_dtype": "float32"})
    rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match="rope_theta = 1000000 and rope_parameters.rope_theta = 10000 disagree"):
        read(tmp_path, GLM_47 | {"rope_parameters": rope})


def test_partial_rotary_factor_is_heeded_when_rope_scaling_is_null(tmp_path: Path) -> None:
    """Fault 7 of glm47.md."""
    assert read(tmp_path, GLM_47 | {"rope_scaling": None, "partial_rotary_factor": 0.25}).rotary_dim == 32


@pytest.mark.parametrize("key", sorted(set(GLM_47) - {"eos_token_id", "quantization_config", "model_type", "dtype"}))
def test_missing_key_is_named_with_its_file(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}/config.json: key {key} .*is missing|key {key} is missing"):
        read(tmp_path, without(GLM_47, key))


def test_missing_dtype_names_both_spellings(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"key dtype \(or torch_dtype\) is missing"):
        read(tmp_path, without(GLM_47, "dtype"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_activations_are_f32_unless_bf16(tmp_path: Path, dtype: str) -> None:
    assert read(tmp_path, AIR_45 | {"dtype": dtype}).activation_dtype == "f32"


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": (
        {"architectures": ["Glm4MoeLiteForCausalLM"]},
        "architecture 'Glm4MoeLiteForCausalLM' is not supported; supported: Glm4MoeForCausalLM",
    ),
    "two architectures": ({"architectures": ["Glm4MoeForCausalLM", "X"]}, "architecture 'Glm4MoeForCausalLM', 'X' is"),
    "architectures not a list": ({"architectures": 7}, "architecture 7 is not supported"),
    "activation function": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    "dtype": ({"dtype": "float8"}, "dtype 'float8' is not supported; supported: bfloat16, float16, float32"),
    "rope scaling": ({"rope_scaling": {"type": "yarn"}}, "rope scaling {'type': 'yarn'} is not supported"),
    "rope type": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}, "rope_theta": 1e6},
        "rope scaling 'yarn' is not supported",
    ),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, what: str) -> None:
    changes, message = UNSUPPORTED[what]
    with pytest.raises(UnsupportedError, match=message):
        read(tmp_path, GLM_47 | changes)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", 0, "an integer from 1 to"),
        ("hidden_size", 5120.0, "an integer from 1 to"),
        ("hidden_size", True, "an integer from 1 to"),
        ("hidden_size", "5120", "an integer from 1 to"),
        ("num_experts_per_tok", 33, "an integer from 1 to 32"),
        ("use_qk_norm", 1, "true or false"),
        ("rms_norm_eps", None, "a number from"),
        ("rope_theta", -1, "a number from"),
        ("partial_rotary_factor", 1.5, "a number from 0.0 to 1.0"),
        ("partial_rotary_factor", 0.01, "to turn an even number of head_dim"),
        ("num_key_value_heads", 7, "a multiple of num_key_value_heads"),
        ("n_group", 3, "a divisor of n_routed_experts"),
        ("n_group", 160, "groups of two experts or more"),
        ("topk_group", 2, "at most n_group"),
        ("first_k_dense_replace", 93, "at most num_hidden_layers"),
        ("eos_token_id", [151552], "token ids from 0 to 151551"),
        ("eos_token_id", [], "token ids from 0"),
        ("eos_token_id", "</s>", "token ids from 0"),
        ("quantization_config", [], "an object"),
    ],
)
def test_value_out_of_range(tmp_path: Path, key: str, value: object, expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        read(tmp_path, GLM_47 | {key: value})


def test_more_experts_per_token_than_the_groups_hold(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="num_experts_per_tok: 8, expected at most what topk_group groups hold"):
        read(tmp_path, GLM_47 | {"n_group": 40, "topk_group": 1})


def test_no_shared_expert_and_all_layers_dense_are_allowed(tmp_path: Path) -> None:
    config = read(tmp_path, GLM_47 | {"n_shared_experts": 0, "first_k_dense_replace": 92})
    assert (config.n_shared_experts, config.first_k_dense_replace) == (0, 92)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(None, (151329, 151336, 151338)), ({"eos_token_id": 7}, (7,)), ({}, (151329, 151336, 151338))],
)
def test_stop_ids_come_from_generation_config_first(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, GLM_47, generation).eos_token_ids == expected


def test_stop_ids_nowhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="key eos_token_id is missing, here and in .*generation_config.json"):
        read(tmp_path, without(GLM_47, "eos_token_id"))


def test_config_file_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: the file is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 1, "hidden_size": 2}')
    with pytest.raises(CheckpointError, match="key 'hidden_size' appears twice"):
        read_model_config(tmp_path)


def quantization(path: str, value: object) -> dict[str, Any]:
    """GLM-4.7's with the key at `path` (of group_0, unless it begins with a slash) changed."""
    changed = copy.deepcopy(CHANNEL_QUANTIZATION)
    where: Any = changed if path.startswith("/") else changed["config_groups"]["group_0"]
    *outer, last = path.strip("/").split(".")
    for key in outer:
        where = where[key]
    where[last] = value
    return GLM_47 | {"quantization_config": changed}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("/quant_method", "awq"),
        ("/format", "pack-quantized"),
        ("weights.num_bits", 4),
        ("weights.type", "int"),
        ("weights.strategy", "tensor"),
        ("weights.dynamic", True),
        ("weights.symmetric", False),
        ("input_activations.strategy", "tensor"),
        ("input_activations.dynamic", False),
        ("/kv_cache_scheme", {"num_bits": 4, "type": "int", "symmetric": True}),
    ],
)
def test_other_quantisation_is_refused_by_name(tmp_path: Path, path: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=rf"{path.strip('/').split('.')[-1]}|num_bits"):
        read(tmp_path, quantization(path, value))


def test_weights_only_quantisation(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="group_0.input_activations: None, expected an object"):
        read(tmp_path, quantization("input_activations", None))


def test_block_scales_in_both_spellings(tmp_path: Path) -> None:
    deepseek = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert read(tmp_path, GLM_47 | {"quantization_config": deepseek}).quantization == "block"
    compressed = copy.deepcopy(CHANNEL_QUANTIZATION)
    group = compressed["config_groups"]["group_0"]
    group["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    group["input_activations"] |= {"strategy": "group", "group_size": 128}
    assert read(tmp_path, GLM_47 | {"quantization_config": compressed}).quantization == "block"
    group["weights"]["block_structure"] = [64, 64]
    with pytest.raises(UnsupportedError, match=r"block_structure \[64, 64\] is not supported"):
        read(tmp_path, GLM_47 | {"quantization_config": compressed})


def test_groups_that_disagree(tmp_path: Path) -> None:
    compressed = copy.deepcopy(CHANNEL_QUANTIZATION)
    block = copy.deepcopy(compressed["config_groups"]["group_0"])
    block["weights"] |= {"strategy": "block", "block_structure": [128, 128]}
    block["input_activations"] |= {"strategy": "group", "group_size": 128}
    compressed["config_groups"]["group_1"] = block
    with pytest.raises(CheckpointError, match="expected one scheme, found block and channel"):
        read(tmp_path, GLM_47 | {"quantization_config": compressed})
