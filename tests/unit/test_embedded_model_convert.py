"""The converter: same logits as the source, and the stored form that GLM-4.7-FP8 has."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from deploy.errors import ModelError
from deploy.models.convert import convert, encode, model_config
from deploy.models.fp8 import quantize_channels
from deploy.models.glm_form import NORM_BIAS, SLICES, expert_width, glm_tensors
from deploy.models.llama import GgufLlama, Vocabulary
from deploy.models.shards import PIECE_BYTES, ShardWriter
from tests.unit.embedded_model_fixtures import CONFIG, FORM, MERGES, SPECIAL, TEMPLATE, TOKENS, RandomLlama, write_gguf
from tests.unit.embedded_model_reference import GlmReference, llama_logits

IDS = [5, 17, 200, 3, 9, 9, 41, 255, 1, 77, 120, 2]
VOCABULARY = Vocabulary(TOKENS, MERGES, list(range(len(SPECIAL))), 1, 2, 0, 2, TEMPLATE)


@pytest.mark.parametrize(("kv_heads", "heads"), [(None, (4, 2)), (3, (6, 3))])
def test_the_glm_form_computes_the_llama_models_logits(kv_heads: int | None, heads: tuple[int, int]) -> None:
    source, form = RandomLlama(), replace(FORM, kv_heads=kv_heads)
    expected = llama_logits(source, IDS)
    config = model_config(CONFIG, form, VOCABULARY)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == heads
    glm = GlmReference(config, dict(glm_tensors(source, form)))
    np.testing.assert_allclose(glm.logits(IDS), expected, atol=1e-5 * np.abs(expected).max())


def test_fewer_kv_heads_than_the_source_has_are_refused() -> None:
    with pytest.raises(ModelError, match="kv_heads: 1, the source has 2"):
        model_config(CONFIG, replace(FORM, kv_heads=1), VOCABULARY)


def test_which_experts_run_depends_on_the_token() -> None:
    glm = GlmReference(model_config(CONFIG, FORM, VOCABULARY), dict(glm_tensors(RandomLlama(), FORM)))
    glm.logits(IDS)
    assert len(glm.experts_used) == CONFIG.layers - FORM.dense_layers
    assert all(len(used) % SLICES == 0 for used in glm.experts_used)
    assert max(len(used) for used in glm.experts_used) > SLICES


def test_constants_of_the_attention_are_exact_in_bf16() -> None:
    tensors = dict(glm_tensors(RandomLlama(), FORM))
    for part, norm in (("q", NORM_BIAS), ("k", NORM_BIAS / 2)):
        bias = tensors[f"model.layers.0.self_attn.{part}_proj.bias"]
        weight = tensors[f"model.layers.0.self_attn.{part}_norm.weight"]
        assert set(np.unique(weight)) == {0.0, norm}
        for constant in (bias, weight):
            np.testing.assert_array_equal(constant.astype(ml_dtypes.bfloat16).astype(np.float32), constant)


def test_fp8_rows_reach_the_largest_code_and_zero_rows_get_scale_one() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    weight[2] = 0
    weight[4] = 0
    weight[4, 7] = np.float32(1e-45)
    quantized, scale = quantize_channels(weight)
    assert quantized.dtype == ml_dtypes.float8_e4m3fn
    assert scale.shape == (6, 1)
    assert scale[2, 0] == 1
    decoded = quantized.astype(np.float32)
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(np.abs(decoded[[0, 1, 3, 5]]).max(axis=1), 448)
    # Half a step of a 3-bit mantissa, or half the smallest subnormal step of 2^-9.
    bound = np.maximum(np.abs(weight) / 16, scale * 2.0**-10)
    assert (np.abs(decoded * scale - weight) <= bound * (1 + 1e-6)).all()


def test_fp8_rounds_to_nearest_even() -> None:
    codes = np.arange(0x7F, dtype=np.uint8)
    exponent, mantissa = codes >> 3, (codes & 7).astype(np.float32)
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.int32) - 7))
    halfway = (values[:-1] + values[1:]) / 2
    row = np.append(halfway, 448.0).astype(np.float32)[None]
    quantized, scale = quantize_channels(row)
    assert scale[0, 0] == 1
    even = codes[:-1] + (codes[:-1] & 1)
    np.testing.assert_array_equal(quantized.view(np.uint8)[0, :-1], even)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fp8_refuses_what_is_not_finite(value: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize_channels(np.array([[1.0, value]], np.float32))


def test_projections_are_fp8_and_nothing_else_is() -> None:
    stored = {k: v for name, tensor in glm_tensors(RandomLlama(), FORM) for k, v in encode(name, tensor)}
    for name, tensor in stored.items():
        if name.endswith("_proj.weight"):
            assert tensor.dtype == ml_dtypes.float8_e4m3fn
            assert stored[f"{name}_scale"].shape == (tensor.shape[0], 1)
        elif name.endswith(("weight_scale", "e_score_correction_bias")):
            assert tensor.dtype == np.float32
        else:
            assert tensor.dtype == ml_dtypes.bfloat16
    expert = stored[f"model.layers.1.mlp.experts.{FORM.experts - 1}.down_proj.weight"]
    assert expert.shape == (CONFIG.hidden, expert_width(CONFIG))
    assert f"model.layers.1.mlp.experts.{FORM.experts}.down_proj.weight" not in stored


def test_a_checkpoint_directory_is_whole(tmp_path: Path) -> None:
    convert(RandomLlama(), VOCABULARY, FORM, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Glm4MoeForCausalLM"]
    assert config["head_dim"] == 2 * CONFIG.head_dim
    assert config["quantization_config"]["format"] == "float-quantized"
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    expected = {k for name, tensor in glm_tensors(RandomLlama(), FORM) for k, _ in encode(name, tensor)}
    assert set(index["weight_map"]) == expected
    with safe_open(tmp_path / "model-00001-of-00001.safetensors", "np") as shard:
        assert set(shard.keys()) == expected
        assert shard.get_slice("model.layers.0.self_attn.q_proj.weight").get_dtype() == "F8_E4M3"


def test_shards_are_cut_at_their_size_and_listed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=40)
    for name in "abcde":
        writer.add(name, np.zeros(5, np.float32))
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 100
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert index["weight_map"] == dict(zip("abcde", [files[0], files[0], files[1], files[1], files[2]], strict=True))
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == files


def test_a_shard_longer_than_a_piece_is_written_whole(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 256, 2 * PIECE_BYTES + 12345, np.uint8)
    writer = ShardWriter(tmp_path, shard_bytes=1)
    writer.add("weight", values)
    writer.close()
    path = tmp_path / "model-00001-of-00001.safetensors"
    with safe_open(path, "np") as shard:
        np.testing.assert_array_equal(shard.get_tensor("weight"), values)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_gguf_file_reads_as_the_model_it_holds(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    read, source = GgufLlama(tmp_path / "tiny.gguf"), RandomLlama()
    assert read.config == CONFIG
    assert read.vocabulary() == VOCABULARY
    for name in source.names():
        tolerance = 0.02 if "token_embd" in name else 0
        np.testing.assert_allclose(read.tensor(name), source.tensor(name), atol=tolerance)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "other.gguf", architecture="gptneox")
    with pytest.raises(ModelError, match="'gptneox'"):
        GgufLlama(tmp_path / "other.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=r"blk\.9\.attn_q\.weight"):
        GgufLlama(tmp_path / "tiny.gguf").tensor("blk.9.attn_q.weight")
