"""Writes small checkpoints for tests: whole ones, and shards with any damage wanted."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine_worker.weights.safetensors_index import ELEMENT_BYTES, INDEX_NAME
from tests.golden.cases import BASE

Tensors = dict[str, tuple[str, list[int]]]  # name -> dtype, shape

CHANNEL_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def header_of(tensors: Tensors) -> dict[str, Any]:
    """A correct header: the tensors lie one after another."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    return header


def write_shard(path: Path, header: Mapping[str, Any] | bytes, data_bytes: int) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data_bytes))


def data_bytes(header: Mapping[str, Any]) -> int:
    return max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)


def write_checkpoint(directory: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 2) -> None:
    """config.json, shards of zeros and an index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard}.safetensors"
        mine = {key: tensors[key] for key in list(tensors)[shard::shards]}
        header = header_of(mine)
        write_shard(directory / name, header, data_bytes(header))
        weight_map |= dict.fromkeys(mine, name)
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Two layers, one dense and one of four experts; a change to None stays as null."""
    return BASE | {"hidden_size": 16, "head_dim": 8, "intermediate_size": 24, "n_routed_experts": 4} | changes


def tiny_tensors(config: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """Names and shapes as transformers saves Glm4MoeForCausalLM; with FP8, a scale per channel."""
    c = config
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    tensors: Tensors = {"model.embed_tokens.weight": ("BF16", [c["vocab_size"], hidden])}

    def linear(name: str, rows: int, cols: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = (dtype, [rows, cols])
        if dtype == "F8_E4M3":
            tensors[f"{name}.weight_scale"] = ("F32", [rows, 1])
        if bias:
            tensors[f"{name}.bias"] = ("BF16", [rows])

    def mlp(name: str, size: int) -> None:
        linear(f"{name}.gate_proj", size, hidden)
        linear(f"{name}.up_proj", size, hidden)
        linear(f"{name}.down_proj", hidden, size)

    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        heads, kv_heads = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        for projection, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            linear(f"{at}.self_attn.{projection}_proj", rows, hidden, c["attention_bias"])
        linear(f"{at}.self_attn.o_proj", hidden, heads)
        if c["use_qk_norm"]:
            tensors |= {f"{at}.self_attn.{x}_norm.weight": ("BF16", [c["head_dim"]]) for x in "qk"}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = ("BF16", [hidden])
        if i < c["first_k_dense_replace"]:
            mlp(f"{at}.mlp", c["intermediate_size"])
            continue
        tensors[f"{at}.mlp.gate.weight"] = ("F32", [c["n_routed_experts"], hidden])
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = ("F32", [c["n_routed_experts"]])
        if c["n_shared_experts"]:
            mlp(f"{at}.mlp.shared_experts", c["n_shared_experts"] * width)
        for e in range(c["n_routed_experts"]):
            mlp(f"{at}.mlp.experts.{e}", width)
    tensors["model.norm.weight"] = ("BF16", [hidden])
    if not c["tie_word_embeddings"]:
        tensors["lm_head.weight"] = ("BF16", [c["vocab_size"], hidden])
    return tensors
