"""The llama models that can be converted, as their GGUF file describes them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deploy.errors import ModelError
from deploy.models.fp8 import Float32


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a llama model; head_dim is hidden / heads and rotated whole."""

    vocab: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    context: int


class LlamaSource(Protocol):
    """f32 weights by the names that a GGUF file uses, q and k in rotate-half order."""

    config: LlamaConfig

    def tensor(self, name: str) -> Float32: ...


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary: tokens by id, merges by rank, and the ids that are never made by merging."""

    tokens: list[str]
    merges: list[str]
    special_ids: list[int]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str


class GgufLlama:
    """A llama model in a GGUF file, dequantised tensor by tensor as asked for."""

    CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like

    def __init__(self, path: Path) -> None:
        import gguf  # noqa: PLC0415 - heavy, and needed only when converting

        self._dequantize = gguf.quants.dequantize
        reader = gguf.GGUFReader(path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise ModelError(f"{path}: general.architecture is {architecture!r}; only 'llama' can be converted")
        if "output.weight" in self._tensors:
            raise ModelError(f"{path}: output.weight is present; only models with tied embeddings can be converted")
        self.config = self._read_config()

    def field(self, key: str) -> Any:
        if key not in self._fields:
            raise ModelError(f"the GGUF file lacks the key {key!r}")
        return self._fields[key].contents()

    def tensor(self, name: str) -> Float32:
        if name not in self._tensors:
            raise ModelError(f"the GGUF file lacks the tensor {name!r}")
        stored = self._tensors[name]
        weight = np.asarray(self._dequantize(stored.data, stored.tensor_type), np.float32)
        if name.endswith("attn_q.weight"):
            return rotate_half_order(weight, self.config.heads)
        if name.endswith("attn_k.weight"):
            return rotate_half_order(weight, self.config.kv_heads)
        return weight

    def vocabulary(self) -> Vocabulary:
        types: list[int] = self.field("tokenizer.ggml.token_type")
        return Vocabulary(
            tokens=self.field("tokenizer.ggml.tokens"),
            merges=self.field("tokenizer.ggml.merges"),
            special_ids=[index for index, kind in enumerate(types) if kind == self.CONTROL_TOKEN],
            bos_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_id=self.field("tokenizer.ggml.eos_token_id"),
            unk_id=self.field("tokenizer.ggml.unknown_token_id"),
            pad_id=self.field("tokenizer.ggml.padding_token_id"),
            chat_template=self.field("tokenizer.chat_template"),
        )

    def _read_config(self) -> LlamaConfig:
        hidden, heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        head_dim = self.field("llama.rope.dimension_count")
        if head_dim * heads != hidden:
            raise ModelError(f"llama.rope.dimension_count {head_dim} is not the head size {hidden}/{heads}")
        return LlamaConfig(
            vocab=self.field("llama.vocab_size"),
            layers=self.field("llama.block_count"),
            hidden=hidden,
            ffn=self.field("llama.feed_forward_length"),
            heads=heads,
            kv_heads=self.field("llama.attention.head_count_kv"),
            head_dim=head_dim,
            rope_theta=float(self.field("llama.rope.freq_base")),
            # The file keeps 1e-5 as f32; six digits give back the number that was meant.
            rms_eps=float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            context=self.field("llama.context_length"),
        )


def rotate_half_order(weight: Float32, heads: int) -> Float32:
    """Undo GGUF's row order of q and k: there the rows of a rope pair are 2i, 2i+1; in a checkpoint i, i+d/2."""
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)
