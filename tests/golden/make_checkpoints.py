# mypy: disable-error-code="import-not-found"
"""Makes tests/golden/data: tiny random checkpoints, and the logits that transformers' Glm4MoeForCausalLM gives them.

Only this script needs torch, which is no dependency of the project. To make the data anew:

    python3 -m venv build/golden-venv
    build/golden-venv/bin/pip install torch==2.13.0 transformers==5.24.0 numpy safetensors==0.8.0
    build/golden-venv/bin/python -m tests.golden.make_checkpoints [CASE...]

FP32 and BF16 checkpoints run through transformers as they are, FP16 ones in f32, FP8 ones with fp8_emulation.py beside
this file.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from tests.golden.cases import BASE, CASES, PROMPT_TOKENS, Case
from tests.golden.fp8_emulation import fp8_linears, quantize_weight

STORED = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SCALES = {"F32": torch.float32, "BF16": torch.bfloat16}
QUANTIZED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")


def main(names: list[str]) -> None:
    for case in CASES:
        if not names or case.name in names:
            make(case)


def make(case: Case) -> None:
    config = case_config(case)
    for seed in itertools.count():
        torch.manual_seed(seed)
        tensors, values = make_weights(case, config)
        ids = torch.randint(0, config["vocab_size"], (1, PROMPT_TOKENS))
        expected, margin = logits(case, config, values, ids)
        if margin >= case.margin:
            break
    print(f"{case.name}: seed {seed}, margin {margin:.2g}")
    arrays = {"token_ids": ids[0].numpy().astype(np.int32), "logits": expected}
    for fault in case.faults:
        arrays[f"fault_{fault}"] = logits(case, config, values, ids, fault)[0]
    write(case, config, tensors, arrays)


def make_weights(case: Case, config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors as the checkpoint holds them, and the f32 weights that the model computes with."""
    tensors = draw_weights(case, config)
    values = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in values if is_fp8(case, name)]:
        quantized = quantize_weight(values[name], case.weights, SCALES[case.scale_dtype])
        tensors[name] = quantized.codes
        suffix = "weight_scale_inv" if case.weights == "block" else "weight_scale"
        tensors[name.removesuffix("weight") + suffix] = quantized.scale
        values[name] = quantized.dequantized
    return tensors, values


def is_fp8(case: Case, name: str) -> bool:
    """Linear layers are quantised; the router, the embeddings and the head are not."""
    return case.weights in ("channel", "block") and name.removesuffix(".weight").endswith(QUANTIZED)


def case_config(case: Case) -> dict[str, Any]:
    config = BASE | case.config
    if "rope_parameters" in config:
        for key in ("rope_theta", "rope_scaling", "partial_rotary_factor"):
            del config[key]
    if case.weights == "channel":
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": _scheme("channel", dynamic=False),
                    "input_activations": _scheme("token", dynamic=True),
                }
            },
        }
    elif case.weights == "block":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    return config


def _scheme(strategy: str, *, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic}


def draw_weights(case: Case, config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the checkpoint's names, scaled so that every block matters to the logits."""
    skeleton = Glm4MoeForCausalLM(hf_config(config))
    dtype = STORED.get(case.weights, STORED["bf16" if config["dtype"] == "bfloat16" else "f32"])
    weights = {}
    for name, parameter in skeleton.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        value = draw(case, name, parameter.shape)
        keep = "mlp.gate." in name  # the router is f32 in every checkpoint
        for part, tensor in split_experts(name, value):
            if tensor.numel():
                weights[part] = tensor if keep else tensor.to(dtype)
    return weights


def draw(case: Case, name: str, shape: torch.Size) -> Tensor:
    noise = torch.randn(shape)
    if name.endswith("e_score_correction_bias"):
        return case.correction_bias + case.bias_spread * noise
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.3 * noise
    if name.endswith("embed_tokens.weight"):
        if case.router_offset:
            noise[:, 0] = 8.0  # one channel that is the same for every token, for the router to lean on
        return noise
    fan_in = noise / shape[-1] ** 0.5
    if name.endswith("mlp.gate.weight"):
        fan_in *= case.router_gain
        if case.router_offset:
            fan_in[:, 0] = case.router_offset / 5.7  # the normed channel is about that large
    return fan_in


def split_experts(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """transformers stacks the experts; a checkpoint has a tensor for each."""
    module, _, stacked = name.rpartition(".")
    if stacked not in ("gate_up_proj", "down_proj"):
        yield name, value
        return
    for e, expert in enumerate(value):
        if stacked == "down_proj":
            yield f"{module}.{e}.down_proj.weight", expert
        else:
            gate, up = expert.chunk(2)
            yield f"{module}.{e}.gate_proj.weight", gate
            yield f"{module}.{e}.up_proj.weight", up


def hf_config(config: dict[str, Any]) -> Glm4MoeConfig:
    known = {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
    hf = Glm4MoeConfig(**known, attn_implementation="eager", experts_implementation="eager")
    assert hf._attn_implementation == "eager" and hf._experts_implementation == "eager"
    return hf


def logits(
    case: Case, config: dict[str, Any], values: dict[str, Tensor], ids: Tensor, fault: str | None = None
) -> tuple[np.ndarray, float]:
    """[tokens][vocab] f32, and by how much the choice of experts was clear at least."""
    if fault == "full_rotary":
        config = config | {"partial_rotary_factor": 1.0}
    if fault == "ungrouped":
        config = config | {"n_group": 1, "topk_group": 1}
    model = Glm4MoeForCausalLM(hf_config(config)).eval()
    quantized = load(model, values, case, config)
    emulation = fp8_linears(quantized, case.weights) if quantized else nullcontext()
    margins = [math.inf]
    for router in routers(model):
        router.register_forward_hook(lambda router, _, out: margins.append(choice_margin(router, out[0])))
    with torch.no_grad(), emulation, router_fault(model, fault):
        out: np.ndarray = model(input_ids=ids).logits[0].float().numpy()
    return out, min(margins)


def routers(model: Glm4MoeForCausalLM) -> list[Glm4MoeTopkRouter]:
    return [module for module in model.modules() if isinstance(module, Glm4MoeTopkRouter)]


def choice_margin(router: Glm4MoeTopkRouter, router_logits: Tensor) -> float:
    """The least distance between what is chosen and what is not, of experts and of groups."""
    biased = router_logits.sigmoid() + router.e_score_correction_bias
    groups = biased.unflatten(-1, (router.num_group, -1))
    best = groups.topk(2, dim=-1)[0].sum(dim=-1).sort(dim=-1, descending=True)[0]
    margins = [math.inf]
    if router.topk_group < router.num_group:
        margins.append((best[:, router.topk_group - 1] - best[:, router.topk_group]).min().item())
        least = groups.topk(2, dim=-1)[0].sum(dim=-1).topk(router.topk_group, dim=-1)[0][:, -1:]
        outside = groups.topk(2, dim=-1)[0].sum(dim=-1) < least
        biased = groups.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)
    if router.top_k < biased.shape[-1]:
        ranked = biased.sort(dim=-1, descending=True)[0]
        margins.append((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min().item())
    return min(margins)


def load(model: Glm4MoeForCausalLM, values: dict[str, Tensor], case: Case, config: dict[str, Any]) -> list[Tensor]:
    """Put `values` into the model; returns its FP8 weights, which stay f32."""
    dtype = torch.bfloat16 if config["dtype"] == "bfloat16" else torch.float32
    quantized = []
    for name, parameter in model.state_dict(keep_vars=True).items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        parts = [values[part] for part, tensor in split_experts(name, parameter.detach()) if tensor.numel()]
        if name.endswith("gate_up_proj"):
            value = torch.stack([torch.cat(parts[i : i + 2]) for i in range(0, len(parts), 2)])
        elif name.endswith("experts.down_proj"):
            value = torch.stack(parts)
        else:
            value = parts[0] if parts else parameter.detach()
        parameter.data = value.contiguous() if is_fp8(case, name) or "mlp.gate." in name else value.to(dtype)
        if is_fp8(case, name):
            quantized.append(parameter.data)
    return quantized


@contextmanager
def router_fault(model: Glm4MoeForCausalLM, fault: str | None) -> Iterator[None]:
    """Break the router the way other engines did; see tests/golden/test_faults.py."""
    for router in routers(model):
        if fault == "bias_bf16":
            router.e_score_correction_bias.data = router.e_score_correction_bias.bfloat16().float()
        elif fault in ("scaling_missing", "scaling_twice"):
            router.routed_scaling_factor **= {"scaling_missing": 0, "scaling_twice": 2}[fault]
    original = Glm4MoeTopkRouter.forward
    if fault == "score_from_bias":
        Glm4MoeTopkRouter.forward = score_from_bias
    yield
    Glm4MoeTopkRouter.forward = original


def score_from_bias(router: Glm4MoeTopkRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights taken from (s + bias) - bias."""
    out = hidden.view(-1, router.hidden_dim).float() @ router.weight.T
    biased = out.sigmoid() + router.e_score_correction_bias
    ids = biased.topk(router.top_k, dim=-1)[1]
    weights = (biased - router.e_score_correction_bias).gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
    return out, weights, ids


def write(case: Case, config: dict[str, Any], tensors: dict[str, Tensor], arrays: dict[str, np.ndarray]) -> None:
    shutil.rmtree(case.directory, ignore_errors=True)
    case.directory.mkdir(parents=True)
    write_json(case, "config.json", config)
    write_json(case, "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    np.savez_compressed(case.directory / "expected.npz", allow_pickle=False, **arrays)
    if case.shards == 1:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, case.directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for shard in range(case.shards):
        file = f"model-{shard + 1:05}-of-{case.shards:05}.safetensors"
        mine = names[shard :: case.shards]
        save_file({name: tensors[name].contiguous() for name in mine}, case.directory / file)
        weight_map |= dict.fromkeys(mine, file)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(case, "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def write_json(case: Case, name: str, value: dict[str, Any]) -> None:
    (case.directory / name).write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
