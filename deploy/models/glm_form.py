"""A llama model as a Glm4MoeForCausalLM with the same logits: every tensor in f32, before any rounding.

Attention. Heads grow from d to 2d dims. Llama's d dims are the half that RoPE rotates; the other half has zero weights
and a constant bias, so large that the RMS of a head is that constant's alone. qk-norm then divides by a known number,
which its weights multiply back, together with sqrt(2): the scores are divided by sqrt(2d), not sqrt(d). The norm's
weights are 0 in the unrotated half. On q all of those dims carry the bias, on k only half of them: then every one of
these constants is a power of two, exact in bf16. Heads that the source does not have come last, with zero weights.

Feed-forward. The first layers are dense. In the others, ffn - 8s neurons are the shared expert and 8 slices of s
neurons are routed experts, zero-padded to the shared expert's width. R replicas of the 8 slices make 8R experts, in a
shuffled order. All slices of a replica share one random router row and one correction bias, so that their scores tie
exactly and the best replica fills the top 8: which experts run depends on the token, what they compute does not. Each
routed weight is routed_scaling_factor / 8, undone in down_proj.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deploy.errors import ModelError
from deploy.models.fp8 import Float32
from deploy.models.llama import LlamaConfig, LlamaSource

NORM_BIAS = 65536.0  # q and k values are below 2^7: they move the RMS by less than 2^-19
SLICES = 8

Tensors = Iterator[tuple[str, Float32]]
Places = npt.NDArray[np.int64]  # expert id -> replica * SLICES + slice


@dataclass(frozen=True)
class GlmForm:
    """The choices of the conversion that the source model does not make."""

    replicas: int = 2
    dense_layers: int = 3
    kv_heads: int | None = None  # with as many query heads to each as before; None: the source's
    routed_scaling_factor: float = 2.5
    seed: int = 20251222

    @property
    def experts(self) -> int:
        return SLICES * self.replicas

    def heads(self, config: LlamaConfig) -> tuple[int, int]:
        """Query heads and KV heads. ModelError if it has fewer than the source."""
        kv_heads = config.kv_heads if self.kv_heads is None else self.kv_heads
        if kv_heads < config.kv_heads:
            raise ModelError(f"kv_heads: {kv_heads}, the source has {config.kv_heads}")
        return config.heads // config.kv_heads * kv_heads, kv_heads


def slice_width(config: LlamaConfig) -> int:
    """Neurons in one routed slice: a ninth of the feed-forward; what is left over goes to the shared expert."""
    return config.ffn // (SLICES + 1)


def expert_width(config: LlamaConfig) -> int:
    """Width of the shared expert, and so of every expert."""
    return config.ffn - SLICES * slice_width(config)


def glm_tensors(source: LlamaSource, form: GlmForm) -> Tensors:
    """Every tensor of the checkpoint by its name there, in f32, layer by layer."""
    yield "model.embed_tokens.weight", source.tensor("token_embd.weight")
    for layer in range(source.config.layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", source.tensor(f"blk.{layer}.attn_norm.weight")
        yield from _attention(source, form, layer, f"{name}.self_attn")
        yield f"{name}.post_attention_layernorm.weight", source.tensor(f"blk.{layer}.ffn_norm.weight")
        if layer < form.dense_layers:
            yield from _mlp(f"{name}.mlp", *_ffn(source, layer))
        else:
            yield from _moe(source, form, layer, f"{name}.mlp")
    yield "model.norm.weight", source.tensor("output_norm.weight")


def _attention(source: LlamaSource, form: GlmForm, layer: int, name: str) -> Tensors:
    dim = source.config.head_dim
    heads, kv_heads = form.heads(source.config)
    biases = {
        "q": np.zeros(2 * dim, np.float32),
        "k": np.zeros(2 * dim, np.float32),
        "v": np.zeros(2 * dim, np.float32),
    }
    biases["q"][dim:] = NORM_BIAS
    biases["k"][dim : dim + dim // 2] = NORM_BIAS
    for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{name}.{part}_proj.weight", _widen_heads(source.tensor(f"blk.{layer}.attn_{part}.weight"), dim, count)
        yield f"{name}.{part}_proj.bias", np.tile(biases[part], count)
    output = source.tensor(f"blk.{layer}.attn_output.weight")
    yield f"{name}.o_proj.weight", np.ascontiguousarray(_widen_heads(output.T, dim, heads).T)
    for part, factor in (("q", np.sqrt(2.0)), ("k", 1.0)):
        rms = np.sqrt(np.mean(biases[part].astype(np.float64) ** 2))
        norm = np.zeros(2 * dim, np.float32)
        norm[:dim] = rms * factor
        yield f"{name}.{part}_norm.weight", norm


def _widen_heads(weight: Float32, dim: int, heads: int) -> Float32:
    """[h * d, n] -> [heads * 2d, n], zeros below each head and after the last."""
    rows, cols = weight.shape
    wide = np.zeros((heads, 2 * dim, cols), np.float32)
    wide[: rows // dim, :dim] = weight.reshape(-1, dim, cols)
    return wide.reshape(-1, cols)


def _ffn(source: LlamaSource, layer: int) -> tuple[Float32, Float32, Float32]:
    gate, up, down = (source.tensor(f"blk.{layer}.ffn_{part}.weight") for part in ("gate", "up", "down"))
    return gate, up, down


def _mlp(name: str, gate: Float32, up: Float32, down: Float32) -> Tensors:
    yield f"{name}.gate_proj.weight", gate
    yield f"{name}.up_proj.weight", up
    yield f"{name}.down_proj.weight", down


def _moe(source: LlamaSource, form: GlmForm, layer: int, name: str) -> Tensors:
    config = source.config
    gate, up, down = _ffn(source, layer)
    width, shared = slice_width(config), expert_width(config)
    padding = ((0, shared - width), (0, 0))
    places = np.random.default_rng((form.seed, layer)).permutation(form.experts)
    yield from _router(source, form, layer, name, places)
    for expert, place in enumerate(places):
        first = shared + (place % SLICES) * width
        rows = slice(first, first + width)
        yield from _mlp(
            f"{name}.experts.{expert}",
            np.pad(gate[rows], padding),
            np.pad(up[rows], padding),
            np.pad(down[:, rows] * np.float32(SLICES / form.routed_scaling_factor), padding[::-1]),
        )
    yield from _mlp(f"{name}.shared_experts", gate[:shared], up[:shared], np.ascontiguousarray(down[:, :shared]))


def _router(source: LlamaSource, form: GlmForm, layer: int, name: str, places: Places) -> Tensors:
    """Rows that give logits of unit variance from a normalised input: a saturated sigmoid would tie the replicas."""
    norm = source.tensor(f"blk.{layer}.ffn_norm.weight")
    rng = np.random.default_rng((form.seed, layer, 1))
    rows = rng.standard_normal((form.replicas, source.config.hidden)) / np.linalg.norm(norm)
    bias = rng.uniform(-0.1, 0.1, form.replicas)
    yield f"{name}.gate.weight", rows[places // SLICES].astype(np.float32)
    yield f"{name}.gate.e_score_correction_bias", bias[places // SLICES].astype(np.float32)
