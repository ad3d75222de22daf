"""Every tensor is consumed or waived by name; formats follow the scales; contradictions name tensor and shard."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from engine_worker.errors import CheckpointError, ConfigError, UnsupportedError, WorkerError
from engine_worker.models import Model, Parallelism, build_model
from engine_worker.weights.records import Experts, Matrix, WeightFormat
from tests.unit.checkpoint_files import (
    CHANNEL_QUANTIZATION,
    Tensors,
    header_of,
    tiny_config,
    tiny_tensors,
    write_checkpoint,
    write_shard,
)

Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
BLOCK_QUANTIZATION = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def fp8_config(**changes: Any) -> dict[str, Any]:
    return tiny_config(quantization_config=CHANNEL_QUANTIZATION, **changes)


def build(directory: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> Model:
    write_checkpoint(directory, config or tiny_config(), tensors)
    return build_model(directory)


def formats(model: Model) -> dict[str, WeightFormat]:
    return {weight.name: weight.format for weight in model.mixed.weights if isinstance(weight, Matrix | Experts)}


def test_every_tensor_is_handed_to_the_engine(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    assert {source.name for source in build(tmp_path, tensors).tensors} == set(tensors)


@pytest.mark.parametrize(("dtype", "expected"), [("F32", "f32"), ("BF16", "bf16"), ("F16", "f16")])
def test_unquantised_formats(tmp_path: Path, dtype: str, expected: str) -> None:
    found = formats(build(tmp_path, tiny_tensors(tiny_config(), dtype)))
    assert found["layers.0.attn.qkv"].value == found["layers.1.moe.down"].value == expected


def test_weights_are_quantised_where_a_scale_lies_beside_them(tmp_path: Path) -> None:
    tensors = tiny_tensors(fp8_config(), "F8_E4M3")
    del tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    tensors["model.layers.0.self_attn.o_proj.weight"] = ("BF16", [16, 24])
    found = formats(build(tmp_path, tensors, fp8_config()))
    assert found["layers.0.attn.o"] is WeightFormat.BF16
    assert found["layers.1.attn.o"] is found["layers.1.moe.up"] is WeightFormat.FP8_CHANNEL
    assert found["head"] is WeightFormat.BF16


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_scale_shape_and_not_its_suffix_tells_the_format(tmp_path: Path, suffix: str) -> None:
    def named(tensors: Tensors) -> Tensors:
        return {name.replace("weight_scale", suffix): value for name, value in tensors.items()}

    tensors = tiny_tensors(fp8_config(), "F8_E4M3")
    assert formats(build(tmp_path / "c", named(tensors), fp8_config()))["layers.1.moe.gate"] is WeightFormat.FP8_CHANNEL
    blocks: Tensors = {
        name: (dtype, [1, 1] if name.endswith("weight_scale") else shape) for name, (dtype, shape) in tensors.items()
    }
    config = tiny_config(quantization_config=BLOCK_QUANTIZATION)
    assert formats(build(tmp_path / "b", named(blocks), config))["layers.1.moe.gate"] is WeightFormat.FP8_BLOCK


def test_config_and_scales_must_agree(tmp_path: Path) -> None:
    tensors = tiny_tensors(fp8_config(), "F8_E4M3")
    with pytest.raises(CheckpointError, match=r"q_proj.weight_scale: .*fp8_channel, but config.json declares no quant"):
        build(tmp_path, tensors, tiny_config())
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight_scale: .*fp8_channel, but config.json declares fp8_block"
    ):
        build(tmp_path, tensors, tiny_config(quantization_config=BLOCK_QUANTIZATION))


DAMAGE: dict[str, tuple[dict[str, tuple[str, list[int]] | None], type[WorkerError], str]] = {
    "missing": ({Q: None}, CheckpointError, f"tensor {Q}: missing from the checkpoint"),
    "missing expert": ({EXPERT: None}, CheckpointError, f"tensor {EXPERT}: missing"),
    "missing bias": ({"model.layers.0.self_attn.v_proj.bias": None}, CheckpointError, "v_proj.bias: missing"),
    "unknown": (
        {"model.layers.0.extra": ("F32", [1])},
        CheckpointError,
        "tensor model.layers.0.extra: .*no use for it",
    ),
    "static activation scale": ({Q.replace("weight", "input_scale"): ("F32", [1])}, CheckpointError, "no use for it"),
    "layer beyond the last": ({"model.layers.2.eh_proj.weight": ("F32", [1])}, CheckpointError, "no use for it"),
    "wrong shape": ({Q: ("BF16", [24, 17])}, CheckpointError, rf"{Q}: .*shape \[24, 17\], expected \[24, 16\]"),
    "wrong rank": ({Q: ("BF16", [384])}, CheckpointError, rf"{Q}: .*shape \[384\], expected \[24, 16\]"),
    "transposed expert": ({EXPERT: ("BF16", [16, 17])}, CheckpointError, rf"{EXPERT}: .*shape"),
    "wrong dtype": ({Q: ("I8", [24, 16])}, CheckpointError, f"{Q}: .*dtype I8, expected one of F32, BF16, F16"),
    "fp8 without scale": ({Q: ("F8_E4M3", [24, 16])}, CheckpointError, f"{Q}: .*F8_E4M3 needs {Q}_scale"),
    "scale of bf16 weight": ({f"{Q}_scale": ("F32", [24, 1])}, CheckpointError, f"{Q}: .*dtype BF16, .*{Q}_scale is"),
    "norm of another dtype": ({"model.norm.weight": ("I32", [16])}, CheckpointError, r"model.norm.weight: .*dtype I32"),
    # Fault 7 of glm47.md: q_norm sized hidden_size instead of head_dim.
    "q_norm of hidden size": (
        {"model.layers.0.self_attn.q_norm.weight": ("BF16", [16])},
        CheckpointError,
        r"q_norm.weight: .*shape \[16\], expected \[8\]",
    ),
    "mixed q and k": ({K: ("F32", [8, 16])}, UnsupportedError, f"tensor {Q} is bf16 but tensor {K} is f32"),
    "mixed experts": (
        {EXPERT: ("F32", [16, 16])},
        UnsupportedError,
        f"experts.0.up_proj.weight is bf16 but tensor {EXPERT} is f32",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_broken_checkpoint(tmp_path: Path, damage: str) -> None:
    changes, kind, message = DAMAGE[damage]
    tensors = tiny_tensors(tiny_config()) | changes
    present: Tensors = {name: value for name, value in tensors.items() if value is not None}
    with pytest.raises(kind, match=message) as raised:
        build(tmp_path, present)
    assert "\n" not in str(raised.value)
    if "missing" not in damage and "mixed" not in damage:
        assert ".safetensors" in str(raised.value)


FP8_DAMAGE: dict[str, tuple[Tensors, type[WorkerError], str]] = {
    "scale for each element": (
        {f"{Q}_scale": ("F32", [24, 16])},
        CheckpointError,
        r"expected \[24, 1\] \(a scale per out",
    ),
    "scale per tensor": ({f"{Q}_scale": ("F32", [1])}, CheckpointError, r"shape \[1\], expected \[24, 1\]"),
    "integer scale": ({f"{Q}_scale": ("I32", [24, 1])}, CheckpointError, "dtype I32"),
    "two scales": ({f"{Q}_scale_inv": ("F32", [24, 1])}, CheckpointError, f"{Q}: has two scales"),
    "experts' scales named differently": (
        {f"{EXPERT}_scale_inv": ("F32", [16, 1])},
        UnsupportedError,
        f"tensor {EXPERT}_scale_inv: expected {EXPERT}_scale, as for expert 0",
    ),
}


@pytest.mark.parametrize("damage", FP8_DAMAGE)
def test_broken_fp8_checkpoint(tmp_path: Path, damage: str) -> None:
    changes, kind, message = FP8_DAMAGE[damage]
    tensors = tiny_tensors(fp8_config(), "F8_E4M3") | changes
    if "named differently" in damage:
        del tensors[f"{EXPERT}_scale"]
    with pytest.raises(kind, match=message):
        build(tmp_path, tensors, fp8_config())


def test_fp8_q_and_bf16_k_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny_tensors(fp8_config(), "F8_E4M3") | {K: ("BF16", [8, 16])}
    del tensors[f"{K}_scale"]
    with pytest.raises(UnsupportedError, match=f"tensor {Q} is fp8_channel but tensor {K} is bf16"):
        build(tmp_path, tensors, fp8_config())


def test_shared_expert_may_have_another_format_than_the_routed_ones(tmp_path: Path) -> None:
    """Fault 5 of glm47.md: they are never computed as one."""
    tensors = tiny_tensors(fp8_config(), "F8_E4M3")
    shared = "model.layers.1.mlp.shared_experts."
    plain: Tensors = {
        name: ("BF16", shape) if name.startswith(shared) else (dtype, shape)
        for name, (dtype, shape) in tensors.items()
        if not (name.startswith(shared) and name.endswith("_scale"))
    }
    found = formats(build(tmp_path, plain, fp8_config()))
    assert found["layers.1.moe.shared.gate_up"] is WeightFormat.BF16
    assert found["layers.1.moe.gate"] is WeightFormat.FP8_CHANNEL


def test_mtp_layer_and_rotary_tables_are_waived(tmp_path: Path) -> None:
    extra: Tensors = {
        "model.layers.2.eh_proj.weight": ("BF16", [16, 32]),
        "model.layers.2.shared_head.norm.weight": ("BF16", [16]),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [2]),
        "model.rotary_emb.inv_freq": ("F32", [2]),
    }
    config = tiny_config(num_nextn_predict_layers=1)
    model = build(tmp_path, tiny_tensors(config) | extra, config)
    assert not set(extra) & {source.name for source in model.tensors}


def test_tied_head_reads_the_embeddings(tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=True)
    model = build(tmp_path / "tied", tiny_tensors(config), config)
    head = next(weight for weight in model.mixed.weights if weight.name == "head")
    assert isinstance(head, Matrix) and head.parts[0].tensor == "model.embed_tokens.weight"
    with pytest.raises(CheckpointError, match=r"tensor lm_head.weight: .*no use for it"):
        build(tmp_path / "both", tiny_tensors(config) | {"lm_head.weight": ("BF16", [96, 16])}, config)


@pytest.mark.parametrize(
    ("dtype", "raw", "refused"),
    [
        ("F32", struct.pack("<f", 1.0), None),
        ("BF16", b"\x80\x3f", None),
        ("F16", struct.pack("<e", 1.0), None),
        ("F32", struct.pack("<f", 0.5), "0.5, only a cache scale of 1 is supported"),
        ("BF16", b"\x00\x40", "2.0, only a cache scale of 1 is supported"),
        ("F32", struct.pack("<f", float("nan")), "nan, only"),
    ],
)
def test_cache_scales_must_be_one(tmp_path: Path, dtype: str, raw: bytes, refused: str | None) -> None:
    name = "model.layers.0.self_attn.k_scale"
    tensors = tiny_tensors(tiny_config()) | {name: (dtype, [1])}
    write_checkpoint(tmp_path, tiny_config(), tensors, shards=1)
    write_shard(tmp_path / "model-0.safetensors", header_of(tensors), 0)
    size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header_of(tensors).values())
    with (tmp_path / "model-0.safetensors").open("ab") as file:
        file.write(bytes(size - len(raw)) + raw)  # it is the last tensor
    if refused is None:
        assert name not in {source.name for source in build_model(tmp_path).tensors}
    else:
        with pytest.raises(UnsupportedError, match=rf"tensor {name}: .*{refused}"):
            build_model(tmp_path)


def test_revision_follows_config_and_headers(tmp_path: Path) -> None:
    config = tiny_config()
    revisions = {
        build(tmp_path / "a", tiny_tensors(config)).revision,
        build(tmp_path / "b", tiny_tensors(config), tiny_config(rope_theta=5.0)).revision,
        build(tmp_path / "c", tiny_tensors(config, "F32")).revision,
    }
    assert len(revisions) == 3
    assert build_model(tmp_path / "a").revision in revisions
    assert build_model(tmp_path / "a", "f32").revision in revisions


def test_revision_tells_layouts_and_caches_apart(tmp_path: Path) -> None:
    config = tiny_config(num_attention_heads=4, num_key_value_heads=4)
    write_checkpoint(tmp_path, config, tiny_tensors(config))
    made = [("auto", 1, None), ("fp8", 1, None), ("auto", 2, 1), ("auto", 2, 2), ("auto", 4, 2)]
    revisions = {build_model(tmp_path, kv_dtype, Parallelism(tp, ep)).revision for kv_dtype, tp, ep in made}  # type: ignore[arg-type]
    assert len(revisions) == len(made)
    assert build_model(tmp_path, "auto", Parallelism(2)).revision in revisions  # ep is the most that suits


def test_unknown_cache_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), tiny_tensors(tiny_config()))
    with pytest.raises(ConfigError, match="kv_dtype: 'int4', expected auto, f32, bf16, fp8"):
        build_model(tmp_path, "int4")  # type: ignore[arg-type]
