"""What a rank keeps in memory, counted from its plans, against counts made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_worker.models import Parallelism, RankPlans, build_model
from engine_worker.plan.memory import RankMemory, page_bytes, rank_memory
from tests.unit.checkpoint_files import CHANNEL_QUANTIZATION, tiny_config, tiny_tensors, write_checkpoint

PAGE_SIZE = 16


def memory(rank: RankPlans) -> RankMemory:
    return rank_memory(rank.mixed, rank.decode, tokens=8, samples=3, pages=10, page_size=PAGE_SIZE)


def ranks(directory: Path, parallelism: Parallelism) -> tuple[RankPlans, ...]:
    config: dict[str, Any] = tiny_config(
        dtype="bfloat16", quantization_config=CHANNEL_QUANTIZATION, num_attention_heads=4, num_key_value_heads=2
    )
    write_checkpoint(directory, config, tiny_tensors(config, "F8_E4M3"))
    return build_model(directory, "auto", parallelism).ranks


def test_weights_count_scales_and_biases_and_each_once(tmp_path: Path) -> None:
    (rank,) = ranks(tmp_path, Parallelism())
    hidden, head, vocab = 16, 8, 96
    qkv, dense, expert = (4 + 2 * 2) * head, 24, 16
    linear = {"qkv": (qkv, hidden), "o": (hidden, 4 * head)}
    swiglu = [
        (dense, hidden),
        (dense, hidden),
        (hidden, dense),
        *[(expert, hidden), (expert, hidden), (hidden, expert)] * 5,
    ]
    fp8 = [*linear.values(), *linear.values(), *swiglu]
    expected = sum(rows * cols + 4 * rows for rows, cols in fp8) + 2 * 4 * qkv  # two layers' biases
    expected += 2 * 2 * vocab * hidden  # embedding and head
    expected += 4 * (5 * hidden + 4 * head)  # norms
    expected += 4 * 4 * hidden + 4 * 4  # the router, f32, and its bias
    assert memory(rank).weights == expected


def test_ranks_share_what_is_not_on_all(tmp_path: Path) -> None:
    (one,) = ranks(tmp_path / "one", Parallelism())
    pair = ranks(tmp_path / "two", Parallelism(2, 2))
    assert memory(pair[0]).kv_pages == memory(one).kv_pages / 2 == 10 * page_bytes(pair[0].mixed.kv, PAGE_SIZE)
    both = sum(memory(rank).weights for rank in pair)
    twice = 2 * 96 * 16 + 4 * (5 * 16 + 4 * 8) + 4 * 4 * 16 + 4 * 4  # embedding, norms, router
    twice += 2 * 4 * 16 + 4 * 2 * 16  # scales of row-parallel weights: o of two layers, a dense and a shared down
    assert both == memory(one).weights + twice


def test_buffers_are_those_of_both_plans(tmp_path: Path) -> None:
    (rank,) = ranks(tmp_path, Parallelism())
    names = {buffer.name for plan in (rank.mixed, rank.decode) for buffer in plan.buffers}
    assert {"last_resid", "x", "logits"} <= names
    assert memory(rank).buffers > 3 * 96 * 4  # the logits
    assert memory(rank).total == memory(rank).weights + memory(rank).kv_pages + memory(rank).buffers
