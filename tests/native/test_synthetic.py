"""Models without a checkpoint: finite, seeded, and the same on every table and layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_worker.errors import InvalidRequestError, UnsupportedError
from engine_worker.models import build_model
from engine_worker.models.layout import Parallelism
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import PAGE_SIZE
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, StepResult, Synthetic, TensorSource
from tests.golden.cases import CASES
from tests.native import tiny
from tests.native.fault_table import FaultTable

BY_NAME = {case.name: case for case in CASES}
ROWS = 64


def config_directory(directory: Path, source: str = "fp8_channel_bf16", **changes: Any) -> Path:
    """Nothing but a config.json: a deeper model than the golden one, whose layers route to half of its experts."""
    config = json.loads((BY_NAME[source].directory / "config.json").read_text())
    config |= {"num_hidden_layers": 24, "num_experts_per_tok": 2, "n_routed_experts": 8, "vocab_size": 512, **changes}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def options(directory: Path, seed: int = 0, parallelism: Parallelism = Parallelism(), **changes: Any) -> EngineOptions:  # noqa: B008
    model = build_model(directory, parallelism=parallelism, synthetic_seed=seed)
    values: dict[str, Any] = {
        "kernels_path": kernel_table_path("cpu"),
        "ranks": rank_options(model),
        "tensors": model.tensors,
        "max_rows": ROWS,
        "max_samples": ROWS,
        "max_slots": 2,
        "max_context": 128,
        "num_pages": 16,
        "num_threads": 2,
    }
    return EngineOptions(**{**values, **changes})


def prefill(engine: Engine) -> StepResult:
    """ROWS tokens of one sequence, the last of which is sampled."""
    tiny.bind(engine, 0)
    updates = [(0, index, index) for index in range(ROWS // PAGE_SIZE)]
    return tiny.step(engine, tiny.batch((0, 0, range(ROWS)), updates=updates))


def greedy(engine: Engine, steps: int = 8) -> list[int]:
    tokens = [int(prefill(engine).token_ids[0])]
    for i in range(steps):
        update = [(0, (ROWS + i) // PAGE_SIZE, (ROWS + i) // PAGE_SIZE)]
        tokens.append(int(tiny.step(engine, tiny.batch((0, ROWS + i, [-1]), updates=update, decode=True)).token_ids[0]))
    return tokens


@pytest.mark.parametrize("source", ["fp8_channel_bf16", "fp8_block", "f32_glm47"])
def test_activations_stay_of_order_one_and_experts_are_all_used(source: str, tmp_path: Path) -> None:
    directory = config_directory(tmp_path, source)
    config = build_model(directory, synthetic_seed=0).config
    with Engine.create(options(directory)) as engine:
        prefill(engine)
        dtype = np.float32 if config.activation_dtype == "f32" else np.uint16
        resid = engine.read_buffer("resid", (ROWS, config.hidden_size), dtype)
        offsets = engine.read_buffer("expert_offsets", (9, 1), np.int32)[:, 0]
    values = resid if dtype == np.float32 else (resid.astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all()
    assert 0.5 < values.std() < 3
    assert (np.diff(offsets) > 0).all(), "each expert has tokens"
    assert offsets[-1] == 2 * ROWS


def test_logits_vary(tmp_path: Path) -> None:
    with Engine.create(options(config_directory(tmp_path))) as engine:
        batch = tiny.batch((0, 0, range(ROWS)), updates=[(0, i, i) for i in range(4)])
        tiny.bind(engine, 0)
        engine.run_ops(batch, range(len(build_model(tmp_path, synthetic_seed=0).mixed.ops) - 1))
        logits = engine.read_buffer("logits", (1, 512), np.float32)
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_the_seed_decides(tmp_path: Path) -> None:
    directory = config_directory(tmp_path)
    found = []
    for seed in (0, 0, 1):
        with Engine.create(options(directory, seed)) as engine:
            found.append(greedy(engine))
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) > 1


def test_only_config_json_is_read(tmp_path: Path) -> None:
    model = build_model(config_directory(tmp_path), synthetic_seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert {source.path for source in model.tensors} == {None}
    assert model.revision != build_model(tmp_path, synthetic_seed=1).revision


def test_weights_are_private_memory(tmp_path: Path) -> None:
    with Engine.create(options(config_directory(tmp_path))) as engine:
        info = engine.info()
    assert info.weight_bytes_mapped == 0
    assert info.weight_bytes_copied > 24 * 8 * 3 * 38 * 128, "the experts alone"


def test_a_rank_slice_runs(tmp_path: Path) -> None:
    directory = config_directory(tmp_path, num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=40)
    with Engine.create(options(directory, parallelism=Parallelism(tp=2, ep=2, rank_slice=0))) as engine:
        token = int(prefill(engine).token_ids[0])
    assert 0 <= token < 256, "of the rank's half of the vocabulary"


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_random_kv_stands_for_a_prefill(kv_dtype: Any, tmp_path: Path) -> None:
    """A decode at position 100 of a sequence that was never computed."""
    directory = config_directory(tmp_path)
    model = build_model(directory, kv_dtype, synthetic_seed=0)
    plans: dict[str, Any] = {"ranks": rank_options(model)}
    batch = tiny.batch((0, 100, [7]), updates=[(0, i, i) for i in range(7)], decode=True)
    attention = []
    for _ in range(2):
        with Engine.create(options(directory, random_kv=True, **plans)) as engine:
            tiny.bind(engine, 0)
            tiny.step(engine, batch)
            attention.append(engine.read_buffer("attn", (1, 96), np.uint16))
    values = (attention[0].astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all()
    assert values.std() > 0.01
    np.testing.assert_array_equal(attention[0], attention[1])


def source_of(**changes: Any) -> TensorSource:
    values = Synthetic(1, 0.0, 1.0)
    source = TensorSource("table", None, 0, 4 * tiny.VOCAB * tiny.HIDDEN, "F32", (tiny.VOCAB, tiny.HIDDEN), values)
    return replace(source, **changes)


def test_bad_values_are_refused(faults: FaultTable) -> None:
    with pytest.raises(InvalidRequestError, match="tensor table: mean 0 and spread inf, expected finite values"):
        Engine.create(tiny.options(faults.path, [source_of(values=Synthetic(1, 0.0, np.inf))]))
    half = source_of(dtype="F16", nbytes=2 * tiny.VOCAB * tiny.HIDDEN)
    with pytest.raises(UnsupportedError, match="tensor table: dtype F16 without a file"):
        Engine.create(tiny.options(faults.path, [half]))
