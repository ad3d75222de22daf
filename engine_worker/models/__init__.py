"""From a checkpoint directory to what an engine is made of: its config, its plans and the tensors that they name."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine_worker.errors import ConfigError
from engine_worker.models.config import ModelConfig, read_model_config
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.glm4_moe import Weights, declare_weights, place_experts, record_step
from engine_worker.models.layout import ONE_RANK, Layout, Parallelism
from engine_worker.models.quantization import fp8_format
from engine_worker.plan.record import KvDtype, Plan
from engine_worker.runtime.records import TensorSource
from engine_worker.weights.manifest import Declarer, Manifest
from engine_worker.weights.records import WeightFormat
from engine_worker.weights.safetensors_index import read_checkpoint
from engine_worker.weights.synthetic import SyntheticManifest

__all__ = ["KvDtypeSetting", "Model", "ModelConfig", "Parallelism", "RankPlans", "build_model"]

KvDtypeSetting = Literal["auto", KvDtype]  # auto: the activations' dtype


@dataclass(frozen=True, slots=True)
class RankPlans:
    layout: Layout
    mixed: Plan
    decode: Plan


@dataclass(frozen=True, slots=True)
class Model:
    """`tensors` are those that any rank's plans name; equal `revision`s give equal numbers (on one kernel table)."""

    config: ModelConfig
    ranks: tuple[RankPlans, ...]
    tensors: tuple[TensorSource, ...]
    revision: str

    @property
    def mixed(self) -> Plan:
        """Of the first rank."""
        return self.ranks[0].mixed

    @property
    def decode(self) -> Plan:
        return self.ranks[0].decode


def build_model(
    directory: Path,
    kv_dtype: KvDtypeSetting = "auto",
    parallelism: Parallelism = ONE_RANK,
    synthetic_seed: int | None = None,
    exchanges: Exchanges = REPLICATED,
) -> Model:
    """Read config, index and shard headers of `directory` and record each rank's plans; no weight is read.

    With `synthetic_seed` the weights are made up and config.json is all that is read. `revision` is the SHA-256 of
    config.json, the index, the shards' headers, the cache's dtype, the layout, placement and exchanges.

    Raises CheckpointError (broken or incomplete checkpoint), UnsupportedError (a model or format that is not
    implemented), ConfigError (`kv_dtype`, `parallelism` or `exchanges`).
    """
    if kv_dtype not in ("auto", *get_args(KvDtype)):
        raise ConfigError(f"kv_dtype: {kv_dtype!r}, expected auto, {', '.join(get_args(KvDtype))}")
    config, config_bytes = read_model_config(directory)
    layouts = parallelism.layouts(config)
    manifest: Declarer
    if synthetic_seed is None:
        checkpoint = read_checkpoint(directory)
        origin = checkpoint.digest
        manifest = Manifest(checkpoint, fp8_format(config.quantization))
    else:
        origin = f"synthetic {synthetic_seed}"
        plain = WeightFormat.BF16 if config.activation_dtype == "bf16" else WeightFormat.F32
        manifest = SyntheticManifest(fp8_format(config.quantization), plain, config.num_hidden_layers, synthetic_seed)
    weights = declare_weights(manifest, config)
    if parallelism.placement is not None:
        weights = place_experts(weights, parallelism.placement)
    tensors = manifest.close()
    cache_dtype: KvDtype = config.activation_dtype if kv_dtype == "auto" else kv_dtype
    numerics = f"kv={cache_dtype} tp={layouts[0].tp} ep={layouts[0].ep}"
    if parallelism.placement is not None:
        numerics += f" placement={parallelism.placement.digest}"
    if exchanges != REPLICATED:
        numerics += f" exchange={exchanges}"
    return Model(
        config=config,
        ranks=tuple(record_rank(config, weights, cache_dtype, layout, exchanges) for layout in layouts),
        tensors=tensors,
        revision=hashlib.sha256(config_bytes + f"{origin} {numerics}".encode()).hexdigest(),
    )


def record_rank(
    config: ModelConfig, weights: Weights, kv_dtype: KvDtype, layout: Layout, exchanges: Exchanges = REPLICATED
) -> RankPlans:
    """`weights` are the whole model's."""
    mixed = record_step("mixed", config, weights, kv_dtype, layout, exchange=exchanges.mixed)
    return RankPlans(layout, mixed, record_step("decode", config, weights, kv_dtype, layout, exchange=exchanges.decode))
