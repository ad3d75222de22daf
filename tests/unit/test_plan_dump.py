"""The plan text of small models is what tests/unit/data holds: a change to it is a change that someone must have meant.

To accept a change: python -m tests.unit.test_plan_dump
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from engine_worker.models import Model, Parallelism, build_model
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.placement import ExpertPlacement
from engine_worker.plan.dump import dump, plan_hash
from tests.unit.checkpoint_files import CHANNEL_QUANTIZATION, tiny_config, tiny_tensors, write_checkpoint

DATA = Path(__file__).parent / "data"

# name -> config, dtype of the linear weights, KV dtype
MODELS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "fp8": (tiny_config(dtype="bfloat16", quantization_config=CHANNEL_QUANTIZATION), "F8_E4M3", "fp8"),
    "bf16": (tiny_config(dtype="bfloat16"), "BF16", "auto"),
    "f32_bare": (
        tiny_config(use_qk_norm=False, attention_bias=False, n_shared_experts=0, tie_word_embeddings=True),
        "F32",
        "auto",
    ),
}


# The last rank of layouts of a model with 4 query and 2 KV heads; the decode plan.
LAYOUTS = {
    "tp2_ep2": Parallelism(2, 2),
    "tp2_ep1": Parallelism(2, 1),
    "tp4_ep2": Parallelism(4, 2),
    "tp4_ep4_slice": Parallelism(4, 4, rank_slice=3),
    "tp4_ep4_a2a": Parallelism(4, 4, placement=ExpertPlacement({1: ((2,), (0,), (3,), (1,))})),
}


def make(directory: Path, name: str) -> Model:
    config, dtype, kv_dtype = MODELS[name]
    write_checkpoint(directory, config, tiny_tensors(config, dtype))
    return build_model(directory, kv_dtype)


def snapshots(directory: Path, name: str) -> dict[str, str]:
    model = make(directory, name)
    return {f"{name}.{plan.name}.plan": dump(plan) for plan in (model.mixed, model.decode)}


def layout_snapshot(directory: Path, name: str) -> str:
    config = MODELS["fp8"][0] | {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_checkpoint(directory, config, tiny_tensors(config, "F8_E4M3"))
    exchanges = Exchanges("all_to_all", "all_to_all") if name.endswith("a2a") else REPLICATED
    return dump(build_model(directory, "auto", LAYOUTS[name], exchanges=exchanges).ranks[-1].decode)


@pytest.mark.parametrize("name", LAYOUTS)
def test_text_of_a_layout_is_as_recorded(tmp_path: Path, name: str) -> None:
    assert layout_snapshot(tmp_path, name) == (DATA / f"{name}.decode.plan").read_text(), (
        f"{name} changed; if that was meant: python -m tests.unit.test_plan_dump"
    )


@pytest.mark.parametrize("name", MODELS)
def test_text_is_as_recorded(tmp_path: Path, name: str) -> None:
    for file, text in snapshots(tmp_path, name).items():
        assert text == (DATA / file).read_text(), (
            f"{file} changed; if that was meant: python -m tests.unit.test_plan_dump"
        )


def test_text_is_the_same_each_time(tmp_path: Path) -> None:
    first, second = make(tmp_path, "fp8"), make(tmp_path, "fp8")
    assert dump(first.mixed) == dump(second.mixed)
    assert plan_hash(first.mixed) == plan_hash(second.mixed)


def test_hash_tells_plans_apart(tmp_path: Path) -> None:
    hashes = {
        plan_hash(plan)
        for name in MODELS
        for model in [make(tmp_path / name, name)]
        for plan in (model.mixed, model.decode)
    }
    assert len(hashes) == 2 * len(MODELS)


def test_lines_keep_the_grammar(tmp_path: Path) -> None:
    """native/PLAN.md: one record a line, fields separated by one space, each key once."""
    for name in MODELS:
        for text in snapshots(tmp_path / name, name).values():
            assert text.startswith("glmplan 1\n") and text.endswith("\n")
            for line in text.splitlines():
                fields = line.split(" ")
                keys = [field.partition("=")[0] for field in fields if "=" in field]
                assert "" not in fields and len(keys) == len(set(keys)), line


def test_both_plans_declare_what_they_share_alike(tmp_path: Path) -> None:
    for name in MODELS:
        model = make(tmp_path / name, name)
        mixed = {operand.name: operand for operand in model.mixed.operands}
        shared = [operand for operand in model.decode.operands if operand.name in mixed]
        assert shared and all(operand == mixed[operand.name] for operand in shared)


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        for model_name in MODELS:
            for file_name, plan_text in snapshots(Path(root) / model_name, model_name).items():
                (DATA / file_name).write_text(plan_text)
        for layout_name in LAYOUTS:
            (DATA / f"{layout_name}.decode.plan").write_text(layout_snapshot(Path(root) / layout_name, layout_name))
