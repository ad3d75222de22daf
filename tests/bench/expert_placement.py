"""What an expert placement is worth under a skewed load: python -m tests.bench.expert_placement [--ep N]

A model of made-up weights whose router prefers low ids (a bias that falls by Zipf's law), so that the first ranks have
most of the work. Loads are recorded, placed, and recorded again; step times are the best of many steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from engine_worker.expert_loads import ExpertLoadReader
from engine_worker.models import Model, Parallelism, build_model
from engine_worker.models.placement import ExpertPlacement, balanced, imbalance
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, TensorSource
from tests.native.tiny import batch, bind, step, write_shard
from tests.unit.checkpoint_files import tiny_config

ROWS, STEPS = 64, 40
SHAPE = {
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def skewed(model: Model, shard: Path) -> list[TensorSource]:
    """The model's tensors, with a router bias of spread 0.2 that prefers low ids."""
    biases = [tensor.name for tensor in model.tensors if tensor.name.endswith("e_score_correction_bias")]
    bias = (0.2 / np.arange(1, model.config.n_routed_experts + 1) ** 0.5).astype(np.float32)
    files = {source.name: source for source in write_shard(shard, dict.fromkeys(biases, bias))}
    return [files.get(tensor.name, tensor) for tensor in model.tensors]


def measure(directory: Path, parallelism: Parallelism, threads: int) -> tuple[dict[int, list[int]], list[float], float]:
    """Loads by layer, each layer's busiest group over the mean, and the best step's milliseconds."""
    model = build_model(directory, "auto", parallelism, synthetic_seed=0)
    options = EngineOptions(
        kernels_path=kernel_table_path("cpu"),
        ranks=rank_options(model),
        tensors=skewed(model, directory / "bias.safetensors"),
        max_rows=ROWS,
        max_samples=ROWS,
        max_slots=ROWS,
        max_context=64,
        num_pages=4 * ROWS,
        num_threads=threads,
    )
    rng, slots = np.random.default_rng(0), range(ROWS)
    with Engine.create(options) as engine:
        bind(engine, *slots)
        times = []
        for position in range(STEPS):
            updates = (
                [(slot, position // 16, slot * 4 + position // 16) for slot in slots] if position % 16 == 0 else []
            )
            tokens = rng.integers(0, model.config.vocab_size, ROWS)
            rows = [(slot, position, [int(tokens[slot])]) for slot in slots]
            times.append(step(engine, batch(*rows, updates=updates, decode=True)).device_ns / 1e6)
        loads = ExpertLoadReader(engine, model).read()
    counts = dict(zip(loads.layers, loads.experts.tolist(), strict=True))
    return counts, [imbalance(groups) for groups in loads.groups.tolist()], min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    plain = Parallelism(arguments.ep, arguments.ep)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(tiny_config(**SHAPE)))
        counts, before, before_ms = measure(directory, plain, arguments.threads)
        placement: ExpertPlacement = balanced(counts, arguments.ep)
        _, after, after_ms = measure(directory, replace(plain, placement=placement), arguments.threads)
    for what, found, best in (("in order of id", before, before_ms), ("placed", after, after_ms)):
        print(
            f"{what:<14} busiest group over mean {fmean(found):.3f} (worst layer {max(found):.3f}), step {best:.2f} ms"
        )


if __name__ == "__main__":
    main()
