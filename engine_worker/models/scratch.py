"""The buffers that a rank's GLM step works in, reused from layer to layer. A plan holds only those that its calls name.

Heads, widths and experts in the shapes below are the rank's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from engine_worker.models.config import ModelConfig
from engine_worker.models.layout import Layout
from engine_worker.models.ops import Activation
from engine_worker.models.quantization import Quantization
from engine_worker.plan.record import SAMPLES, TOKENS, ActDtype, Buffer, Rope, Rows, Size
from engine_worker.weights.records import Experts, Matrix, Span, blocks


@dataclass(frozen=True, slots=True)
class Forms:
    """Room for one value in each form that a reader may take."""

    plain: Buffer
    q: Buffer
    scale: Buffer

    def for_readers(self, *readers: Matrix | Experts) -> Activation:
        """The forms that the readers take: FP8 weights take FP8 activations, others plain ones."""
        fp8 = any(reader.format.is_fp8 for reader in readers)
        plain = not all(reader.format.is_fp8 for reader in readers)
        return Activation(self.plain if plain else None, self.q if fp8 else None, self.scale if fp8 else None)


@dataclass(frozen=True, slots=True)
class MlpScratch:
    gate_up: Buffer  # [T][2*width]
    hidden: Forms  # [T][width]

    @classmethod
    def of_width(cls, name: str, width: int, c: ModelConfig) -> Self:
        return cls(
            Buffer(f"{name}_gate_up", c.activation_dtype, TOKENS, 2 * width),
            _forms(f"{name}_hidden", TOKENS, width, c),
        )


@dataclass(frozen=True, slots=True)
class Scratch:
    resid: Buffer  # [T][hidden]: the residual stream
    delta: Buffer  # [T][hidden]: the last block's output, not yet added
    x: Forms  # [T][hidden]: normed
    qkv: Buffer  # [T][(heads + 2*kv_heads)*head_dim]
    q: Buffer  # [T][heads*head_dim]
    attn: Forms  # [T][heads*head_dim]
    dense: MlpScratch
    shared: MlpScratch
    whole_shared: MlpScratch  # of the whole width, for an exchange of tokens
    products: Buffer  # [top_k*T][hidden], likewise
    ids: Buffer  # [T][top_k]
    weights: Buffer  # [T][top_k]
    offsets: Buffer  # [local experts + 1]
    order: Buffer  # [top_k*T]
    expert_hidden: Forms  # [top_k*T][width]
    last_resid: Buffer  # [S][hidden]
    last_delta: Buffer  # [S][hidden]
    last_x: Forms  # [S][hidden]
    logits: Buffer  # [S][tokens of this rank]
    rope: Rope

    @classmethod
    def for_rank(cls, c: ModelConfig, layout: Layout) -> Self:
        act: ActDtype = c.activation_dtype
        hidden, top_k = c.hidden_size, c.num_experts_per_tok
        q_cols, kv_cols = _size(layout.heads(c)) * c.head_dim, _size(layout.kv_heads(c)) * c.head_dim
        shared_width = layout.width(c.n_shared_experts * c.moe_intermediate_size, c)
        assignments = Rows(Size.TOKENS, top_k)
        return cls(
            resid=Buffer("resid", act, TOKENS, hidden),
            delta=Buffer("delta", act, TOKENS, hidden),
            x=_forms("x", TOKENS, hidden, c),
            qkv=Buffer("qkv", act, TOKENS, q_cols + 2 * kv_cols),
            q=Buffer("q", act, TOKENS, q_cols),
            attn=_forms("attn", TOKENS, q_cols, c),
            dense=MlpScratch.of_width("dense", _size(layout.width(c.intermediate_size, c)), c),
            shared=MlpScratch.of_width("shared", _size(shared_width), c),
            whole_shared=MlpScratch.of_width("whole_shared", c.n_shared_experts * c.moe_intermediate_size, c),
            products=Buffer("expert_products", act, assignments, hidden),
            ids=Buffer("expert_ids", "i32", TOKENS, top_k),
            weights=Buffer("expert_weights", "f32", TOKENS, top_k),
            offsets=Buffer("expert_offsets", "i32", Rows(Size.ONE, _size(layout.experts(c)) + 1), 1),
            order=Buffer("expert_order", "i32", assignments, 1),
            expert_hidden=_forms("expert_hidden", assignments, _size(layout.expert_width(c)), c),
            last_resid=Buffer("last_resid", act, SAMPLES, hidden),
            last_delta=Buffer("last_delta", act, SAMPLES, hidden),
            last_x=_forms("last_x", SAMPLES, hidden, c),
            logits=Buffer("logits", "f32", SAMPLES, _size(layout.vocab(c))),
            rope=Rope("rope", c.rotary_dim, c.rope_theta),
        )


def _size(span: Span) -> int:
    return span[1] - span[0]


def _forms(name: str, rows: Rows, cols: int, c: ModelConfig) -> Forms:
    return Forms(
        Buffer(name, c.activation_dtype, rows, cols),
        Buffer(f"{name}_q", "fp8", rows, cols),
        Buffer(f"{name}_scale", "f32", rows, _scale_cols(cols, c.quantization)),
    )


def _scale_cols(cols: int, quantization: Quantization | None) -> int:
    return blocks(cols) if quantization == "block" else 1
