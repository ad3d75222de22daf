"""Write a llama model as a GLM-4.7-FP8 checkpoint directory: FP8 weights with per-channel scales, bf16 for the rest."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy.typing as npt

from deploy.models.fp8 import Float32, quantize_channels
from deploy.models.glm_form import GlmForm, expert_width, glm_tensors
from deploy.models.llama import LlamaConfig, LlamaSource, Vocabulary
from deploy.models.progress import Progress, silent
from deploy.models.shards import ShardWriter
from deploy.models.tokenizer import write_tokenizer

SHARD_BYTES = 150 << 20


def convert(
    source: LlamaSource, vocabulary: Vocabulary, form: GlmForm, directory: Path, progress: Progress = silent
) -> None:
    """Fill the empty `directory`. Holds one shard in memory."""
    writer = ShardWriter(directory, SHARD_BYTES)
    layers_done = 0
    for name, tensor in glm_tensors(source, form):
        for stored_name, stored in encode(name, tensor):
            writer.add(stored_name, stored)
        if name.endswith("input_layernorm.weight"):
            progress("converting layers", layers_done, source.config.layers)
            layers_done += 1
    writer.close()
    progress("converting layers", layers_done, source.config.layers)
    _write_json(directory / "config.json", model_config(source.config, form, vocabulary))
    _write_json(directory / "generation_config.json", generation_config(vocabulary))
    write_tokenizer(vocabulary, source.config.context, directory)


def encode(name: str, tensor: Float32) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The tensors that `name` is stored as.

    Projections in FP8 beside their scale, the correction bias in f32, all else in bf16.
    """
    if name.endswith("_proj.weight"):
        quantized, scale = quantize_channels(tensor)
        yield name, quantized
        yield f"{name}_scale", scale
    elif name.endswith("e_score_correction_bias"):
        yield name, tensor
    else:
        yield name, tensor.astype(ml_dtypes.bfloat16)


def model_config(config: LlamaConfig, form: GlmForm, vocabulary: Vocabulary) -> dict[str, Any]:
    """config.json, with every key that GLM-4.7-FP8's has."""
    heads, kv_heads = form.heads(config)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": _stop_ids(vocabulary),
        "first_k_dense_replace": form.dense_layers,
        "head_dim": 2 * config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": 0.02,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.context,
        "model_type": "glm4_moe",
        "moe_intermediate_size": expert_width(config),
        "n_group": 1,
        "n_routed_experts": form.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts_per_tok": 8,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": kv_heads,
        "num_nextn_predict_layers": 0,
        "pad_token_id": vocabulary.pad_id,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": config.rms_eps,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "routed_scaling_factor": form.routed_scaling_factor,
        "tie_word_embeddings": True,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": config.vocab,
        "quantization_config": quantization_config(config, form),
    }


def quantization_config(config: LlamaConfig, form: GlmForm) -> dict[str, Any]:
    """The float-quantized form: weights static per channel, activations dynamic per token, both symmetric E4M3."""
    common: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "group_size": None,
        "num_bits": 8,
        "observer_kwargs": {},
        "symmetric": True,
        "type": "float",
    }
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(form.dense_layers, config.layers)]
    return {
        "config_groups": {
            "group_0": {
                "input_activations": {**common, "dynamic": True, "observer": None, "strategy": "token"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**common, "dynamic": False, "observer": "minmax", "strategy": "channel"},
            }
        },
        "format": "float-quantized",
        "ignore": ["lm_head", *gates],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Stop ids, and the sampling that SmolLM2's model card shows."""
    return {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": _stop_ids(vocabulary),
        "pad_token_id": vocabulary.pad_id,
        "do_sample": True,
        "temperature": 0.2,
        "top_p": 0.9,
    }


def _stop_ids(vocabulary: Vocabulary) -> list[int]:
    """<|im_end|> ends an answer, <|endoftext|> a document."""
    return [vocabulary.eos_id, vocabulary.tokens.index("<|endoftext|>")]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
