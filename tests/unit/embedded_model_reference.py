"""Forward passes of llama and GLM-4.7 in NumPy over whole prompts, independent of the converter and of the engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from deploy.models.llama import LlamaSource

Array = npt.NDArray[Any]
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def read_checkpoint(directory: Path) -> dict[str, Array]:
    """Every tensor of every shard, mapped."""
    tensors = {}
    for shard in directory.glob("*.safetensors"):
        data = np.memmap(shard, np.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = data[start + first : start + last].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def rotate_half(x: Array, theta: float) -> Array:
    """x [tokens, heads, dim], positions 0.. along the first axis."""
    tokens, _, dim = x.shape
    angle = np.arange(tokens)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    low, high = x[..., : dim // 2], x[..., dim // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def causal_attention(q: Array, k: Array, v: Array) -> Array:
    """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads * dim]."""
    tokens, heads, dim = q.shape
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", probabilities, v)
    return mixed.reshape(tokens, -1)


def silu(x: Array) -> Array:
    activated: Array = x / (1 + np.exp(-x))
    return activated


def llama_logits(source: LlamaSource, ids: list[int]) -> Array:
    """[tokens, vocab] in float64."""
    config = source.config

    def weight(name: str) -> Array:
        return source.tensor(name).astype(np.float64)

    embedding = weight("token_embd.weight")
    x = embedding[ids]
    for layer in range(config.layers):
        block = f"blk.{layer}"
        h = rms_norm(x, weight(f"{block}.attn_norm.weight"), config.rms_eps)
        q, k, v = (
            (h @ weight(f"{block}.attn_{part}.weight").T).reshape(len(ids), -1, config.head_dim) for part in "qkv"
        )
        q, k = rotate_half(q, config.rope_theta), rotate_half(k, config.rope_theta)
        x = x + causal_attention(q, k, v) @ weight(f"{block}.attn_output.weight").T
        h = rms_norm(x, weight(f"{block}.ffn_norm.weight"), config.rms_eps)
        gate, up, down = (weight(f"{block}.ffn_{part}.weight") for part in ("gate", "up", "down"))
        x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
    return rms_norm(x, weight("output_norm.weight"), config.rms_eps) @ embedding.T


class GlmReference:
    """Glm4MoeForCausalLM. A weight beside a `weight_scale` is FP8, and so are its inputs."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.config = config
        self.tensors = tensors
        self.experts_used: list[set[int]] = []

    def weight(self, name: str) -> Array:
        return self.tensors[name].astype(np.float64)

    def linear(self, x: Array, name: str) -> Array:
        weight = self.weight(f"{name}.weight")
        if f"{name}.weight_scale" in self.tensors:
            weight = weight * self.weight(f"{name}.weight_scale")
            scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / 448, 1e-12)
            x = (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
        bias = self.tensors.get(f"{name}.bias")
        return x @ weight.T + (0 if bias is None else bias.astype(np.float64))

    def logits(self, ids: list[int]) -> Array:
        config = self.config
        self.experts_used = []
        embedding = self.weight("model.embed_tokens.weight")
        x = embedding[ids]
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            h = rms_norm(x, self.weight(f"{name}.input_layernorm.weight"), config["rms_norm_eps"])
            x = x + self.attention(h, f"{name}.self_attn")
            h = rms_norm(x, self.weight(f"{name}.post_attention_layernorm.weight"), config["rms_norm_eps"])
            dense = layer < config["first_k_dense_replace"]
            x = x + (self.mlp(h, f"{name}.mlp") if dense else self.moe(h, f"{name}.mlp"))
        return rms_norm(x, self.weight("model.norm.weight"), config["rms_norm_eps"]) @ embedding.T

    def attention(self, h: Array, name: str) -> Array:
        config = self.config
        dim, eps = config["head_dim"], config["rms_norm_eps"]
        rotary = int(dim * config["partial_rotary_factor"])
        q, k, v = (self.linear(h, f"{name}.{part}_proj").reshape(len(h), -1, dim) for part in "qkv")
        q, k = (rms_norm(x, self.weight(f"{name}.{part}_norm.weight"), eps) for part, x in (("q", q), ("k", k)))
        q, k = (
            np.concatenate([rotate_half(x[..., :rotary], config["rope_theta"]), x[..., rotary:]], axis=-1)
            for x in (q, k)
        )
        return self.linear(causal_attention(q, k, v), f"{name}.o_proj")

    def mlp(self, h: Array, name: str) -> Array:
        gated = silu(self.linear(h, f"{name}.gate_proj")) * self.linear(h, f"{name}.up_proj")
        return self.linear(gated, f"{name}.down_proj")

    def moe(self, h: Array, name: str) -> Array:
        config = self.config
        scores = 1 / (1 + np.exp(-(h @ self.weight(f"{name}.gate.weight").T)))
        biased = scores + self.weight(f"{name}.gate.e_score_correction_bias")
        chosen = np.argsort(-biased, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
        weights = np.take_along_axis(scores, chosen, axis=-1)
        weights *= config["routed_scaling_factor"] / weights.sum(axis=-1, keepdims=True)
        self.experts_used.append(set(chosen.ravel().tolist()))
        out = self.mlp(h, f"{name}.shared_experts")
        for expert in np.unique(chosen):
            token, rank = np.nonzero(chosen == expert)
            out[token] += weights[token, rank, None] * self.mlp(h[token], f"{name}.experts.{expert}")
        return out
