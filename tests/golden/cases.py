"""The golden checkpoints: what each one covers and how closely logits must match. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DATA = Path(__file__).parent / "data"
PROMPT_TOKENS = 49  # three pages and one token

Weights = Literal["f32", "bf16", "f16", "channel", "block"]


@dataclass(frozen=True)
class Case:
    """One checkpoint under data/.

    `tolerance` bounds |logits - expected| / |expected| (2-norms over the vocabulary) of each position, `typical` their
    median. Rounding may not decide which experts are chosen, so the random seed is one that keeps every choice `margin`
    clear of the next best.
    """

    name: str
    weights: Weights
    tolerance: float
    typical: float
    margin: float
    config: dict[str, Any] = field(default_factory=dict)
    scale_dtype: Literal["F32", "BF16"] = "F32"
    shards: int = 2
    correction_bias: float = 0.0  # added to every expert's; the spread around it is bias_spread
    bias_spread: float = 0.2
    router_gain: float = 2.0  # standard deviation of the router's logits
    router_offset: float = 0.0  # shifts every router logit by about this
    faults: tuple[str, ...] = ()  # variants whose logits are stored as well: what the fault would give

    @property
    def directory(self) -> Path:
        return DATA / self.name


BASE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "dtype": "float32",
    "eos_token_id": [3, 5],
    "first_k_dense_replace": 1,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 72,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 96,
}

# (tolerance, typical, margin). FP8 on f32 activations is as near as f32, except for a token with a value so near to the
# middle of two codes that the order of a sum decides between them. BF16 rounds activations, and transformers does so at
# other places; before FP8 that moves a few values in a hundred by a code: both are 5e-2 away from the f32 computation.
F32 = (5e-6, 2e-6, 1e-4)
FP8 = (5e-2, 2e-6, 5e-3)
BF16 = (3e-2, 1.5e-2, 1e-2)
FP8_BF16 = (1.5e-1, 7e-2, 0.0)  # every expert is chosen
CASES = (
    # Everything that GLM-4.5-Air leaves off, in the newer spelling of the config, in one unsharded file.
    Case(
        "f32_air",
        "f32",
        *F32,
        {
            "attention_bias": False,
            "use_qk_norm": False,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "routed_scaling_factor": 1.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        shards=1,
    ),
    # GLM-4.7's shape: 12 query heads to a KV head.
    Case(
        "f32_glm47",
        "f32",
        *F32,
        {"num_attention_heads": 12, "head_dim": 16, "rope_theta": 1e6},
        faults=("full_rotary", "scaling_missing", "scaling_twice"),
    ),
    # Two of four groups, experts unnormalised, no dense layer, two shared experts.
    Case(
        "f32_groups",
        "f32",
        *F32,
        {
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "num_hidden_layers": 1,
            "num_experts_per_tok": 3,
        },
        faults=("ungrouped",),
    ),
    # Nothing but dense layers; embeddings tied.
    Case("f32_dense_tied", "f32", *F32, {"first_k_dense_replace": 2, "tie_word_embeddings": True, "head_dim": 64}),
    # No shared expert; correction biases that differ only where bf16 cannot tell them apart.
    Case(
        "f32_correction_bias",
        "f32",
        *F32,
        {"n_shared_experts": 0},
        correction_bias=11.3,
        bias_spread=0.015,
        router_gain=0.05,
        faults=("bias_bf16",),
    ),
    # Scores near sigmoid(-30), which (s + bias) - bias turns into 0.
    Case(
        "f32_small_scores",
        "f32",
        *F32,
        {"num_hidden_layers": 1, "first_k_dense_replace": 0},
        correction_bias=11.3,
        router_offset=-30.0,
        faults=("score_from_bias",),
    ),
    # No size is a multiple of 8.
    Case(
        "f32_odd_sizes",
        "f32",
        *F32,
        {
            "hidden_size": 54,
            "intermediate_size": 57,
            "moe_intermediate_size": 19,
            "vocab_size": 97,
            "head_dim": 20,
            "n_routed_experts": 7,
        },
    ),
    Case("f16", "f16", *F32, {"dtype": "float16"}),
    Case("bf16", "bf16", *BF16, {"dtype": "bfloat16"}),
    Case("fp8_channel_f32", "channel", *FP8, {"hidden_size": 88, "intermediate_size": 136}),
    Case(
        "fp8_channel_bf16",
        "channel",
        *FP8_BF16,
        {"dtype": "bfloat16", "hidden_size": 128, "moe_intermediate_size": 38, "num_experts_per_tok": 8},
        scale_dtype="BF16",
    ),
    Case(
        "fp8_channel_odd_sizes",
        "channel",
        *FP8,
        {
            "hidden_size": 54,
            "intermediate_size": 57,
            "moe_intermediate_size": 19,
            "vocab_size": 97,
            "head_dim": 20,
            "n_routed_experts": 7,
        },
        scale_dtype="BF16",
    ),
    Case(
        "fp8_block",
        "block",
        *FP8,
        {
            "hidden_size": 136,
            "intermediate_size": 200,
            "moe_intermediate_size": 132,
            "n_routed_experts": 3,
            "num_attention_heads": 5,
        },
    ),
    # 8 KV heads, and widths that 8 ranks divide: tensor and expert parallelism up to 8.
    Case(
        "f32_8_kv_heads",
        "f32",
        *F32,
        {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "hidden_size": 40},
    ),
    Case(
        "fp8_channel_8_kv_heads",
        "channel",
        *FP8,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": 16,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "vocab_size": 101,
        },
    ),
    # 3 KV heads, and widths that 3 and 6 ranks divide.
    Case(
        "bf16_3_kv_heads",
        "bf16",
        *BF16,
        {
            "dtype": "bfloat16",
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "moe_intermediate_size": 24,
            "n_routed_experts": 6,
        },
    ),
    # Two ranks cut no block.
    Case(
        "fp8_block_wide",
        "block",
        *FP8,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "n_routed_experts": 4,
        },
    ),
)
