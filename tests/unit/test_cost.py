"""The roofline's bytes and FLOPs against counts made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_worker.models import Parallelism, build_model
from engine_worker.plan.cost import OpCost, expected_experts, floor_seconds, merge_layers, step_cost, total
from engine_worker.plan.record import Plan
from tests.unit.checkpoint_files import CHANNEL_QUANTIZATION, tiny_config, tiny_tensors, write_checkpoint

HIDDEN, HEAD_DIM, HEADS, VOCAB = 16, 8, 3, 96
EXPERTS, TOP_K, WIDTH = 4, 2, 16
TOKEN_KV_BYTES = 2 * 1 * HEAD_DIM * 2  # K and V, one head, bf16


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    directory = tmp_path_factory.mktemp("checkpoint")
    config = tiny_config(dtype="bfloat16", quantization_config=CHANNEL_QUANTIZATION)
    write_checkpoint(directory, config, tiny_tensors(config, "F8_E4M3"))
    model = build_model(directory)
    return {"mixed": model.mixed, "decode": model.decode}


def by_label(costs: list[OpCost]) -> dict[str, OpCost]:
    return {cost.label: cost for cost in costs}


def test_linear(plans: dict[str, Plan]) -> None:
    cost = by_label(step_cost(plans["decode"], 5, 5, [7] * 5))["layers.0.attn.qkv"]
    rows = (HEADS + 2) * HEAD_DIM
    assert cost.weight_bytes == rows * HIDDEN + 4 * rows + 4 * rows  # FP8, scales, biases
    assert cost.activation_bytes == 5 * (HIDDEN + 4 + 2 * rows)  # x, its scale, out
    assert cost.flops == 2 * 5 * rows * HIDDEN
    assert cost.kv_bytes == 0


def test_embedding_reads_a_row_for_each_token(plans: dict[str, Plan]) -> None:
    cost = by_label(step_cost(plans["decode"], 5, 5, [7] * 5))["embed"]
    assert cost.weight_bytes == cost.activation_bytes == 5 * HIDDEN * 2


def test_norm_reads_and_writes_the_residual_it_adds_to(plans: dict[str, Plan]) -> None:
    costs = by_label(step_cost(plans["decode"], 5, 5, [7] * 5))
    first, later = costs["layers.0.attn.norm"], costs["layers.1.attn.norm"]
    assert first.activation_bytes == 5 * (2 * HIDDEN + HIDDEN + 4)
    assert later.activation_bytes == 5 * (3 * 2 * HIDDEN + HIDDEN + 4)
    assert first.weight_bytes == 4 * HIDDEN and first.flops == 0


def test_decode_attention_reads_every_cached_key(plans: dict[str, Plan]) -> None:
    costs = by_label(step_cost(plans["decode"], 3, 3, [1, 16, 100]))
    assert costs["layers.1.attn.core"].kv_bytes == 117 * TOKEN_KV_BYTES
    assert costs["layers.1.attn.core"].flops == 4 * HEADS * HEAD_DIM * 117
    assert costs["layers.1.attn.rope_store"].kv_bytes == 3 * TOKEN_KV_BYTES


def test_prefill_attention_is_causal(plans: dict[str, Plan]) -> None:
    cost = by_label(step_cost(plans["mixed"], 4, 1, [10]))["layers.0.attn.core"]
    assert cost.flops == 4 * HEADS * HEAD_DIM * (7 + 8 + 9 + 10)
    assert cost.kv_bytes == 10 * TOKEN_KV_BYTES


def test_prefill_rows_are_spread_over_sequences(plans: dict[str, Plan]) -> None:
    cost = by_label(step_cost(plans["mixed"], 5, 2, [3, 2]))["layers.0.attn.core"]
    assert cost.flops == 4 * HEADS * HEAD_DIM * (1 + 2 + 3 + 1 + 2)


def test_only_sampled_rows_reach_the_head(plans: dict[str, Plan]) -> None:
    costs = by_label(step_cost(plans["mixed"], 50, 2, [50]))
    assert costs["head.logits"].flops == 2 * 2 * HIDDEN * VOCAB
    assert costs["head.gather_resid"].activation_bytes == 2 * 2 * (2 * HIDDEN)
    assert costs["head.sample"].activation_bytes == 2 * VOCAB * 4


@pytest.mark.parametrize("touched", [None, 1, 4])
def test_experts_count_once_for_each_that_is_touched(plans: dict[str, Plan], touched: int | None) -> None:
    costs = by_label(step_cost(plans["decode"], 3, 3, [1] * 3, touched))
    count = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** 3) if touched is None else touched
    one_matrix = WIDTH * HIDDEN + 4 * WIDTH  # FP8, scales; width and hidden are equal here
    assert costs["layers.1.moe.gate_up"].weight_bytes == count * 2 * one_matrix
    assert costs["layers.1.moe.down"].weight_bytes == count * one_matrix
    assert costs["layers.1.moe.gate_up"].flops == 2 * 3 * TOP_K * 2 * WIDTH * HIDDEN


def test_expected_experts() -> None:
    assert expected_experts(160, 8, 0) == 0
    assert expected_experts(160, 8, 1) == pytest.approx(8)
    assert expected_experts(160, 8, 64) == pytest.approx(153.99, abs=0.01)
    assert expected_experts(8, 8, 1) == 8


def test_merged_layers_keep_the_total(plans: dict[str, Plan]) -> None:
    costs = step_cost(plans["mixed"], 9, 2, [9])
    merged = merge_layers(costs)
    assert by_label(merged)["layers.*.attn.qkv"].calls == 2
    assert len(merged) < len(costs) and len({cost.label for cost in merged}) == len(merged)
    assert total(merged) == total(costs)
    assert total(costs).total_bytes == pytest.approx(sum(cost.total_bytes for cost in costs))


def test_floor_takes_the_slower_of_memory_and_arithmetic_op_by_op() -> None:
    memory = OpCost("a", "linear", 1, 100, 50, 50, 10)
    arithmetic = OpCost("b", "linear", 1, 1, 0, 0, 1000)
    assert floor_seconds([memory, arithmetic], bytes_per_second=10, flops_per_second=100) == 20 + 10


@pytest.mark.parametrize(
    ("tokens", "samples", "contexts", "message"),
    [
        (1, 1, [1, 1], "tokens: 1, expected at least one for each of 2 sequences"),
        (1, 0, [], "tokens: 1, expected"),
        (4, 1, [3], "contexts: 3, expected at least the 4 tokens"),
        (4, 5, [4], "samples: 5, expected 0 to tokens = 4"),
    ],
)
def test_rows_must_fit_the_sequences(
    plans: dict[str, Plan], tokens: int, samples: int, contexts: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        step_cost(plans["mixed"], tokens, samples, contexts)


def test_empty_step_costs_no_rows(plans: dict[str, Plan]) -> None:
    costs = step_cost(plans["mixed"], 0, 0, [])
    assert total(costs).flops == total(costs).kv_bytes == 0


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_ranks_together_do_the_work_of_one(tmp_path: Path, tp: int, ep: int) -> None:
    """Products and cached keys are shared out; only a KV head that several ranks read is read by each of them."""
    config = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    write_checkpoint(tmp_path, config, tiny_tensors(config))
    one = total(step_cost(build_model(tmp_path).decode, 6, 6, [20] * 6))
    ranks = [
        total(step_cost(rank.decode, 6, 6, [20] * 6))
        for rank in build_model(tmp_path, "auto", Parallelism(tp, ep)).ranks
    ]
    copies = max(1, tp // 2)  # of a KV head
    routers = 2 * 6 * EXPERTS * HIDDEN  # every rank routes
    kv = 2 * 6 * HIDDEN * 2 * 2 * 2 * HEAD_DIM  # of two layers: K and V of two heads
    repeated = (tp - 1) * routers + (copies - 1) * kv
    assert sum(rank.flops for rank in ranks) == pytest.approx(one.flops + repeated)
    assert sum(rank.kv_bytes for rank in ranks) == one.kv_bytes * copies


def test_a_rank_touches_its_experts_as_often_as_the_whole_does() -> None:
    assert expected_experts(160, 8, 64, 20) == expected_experts(160, 8, 64) / 8


def test_a_sum_over_ranks_costs_a_norm_no_memory(tmp_path: Path) -> None:
    config = tiny_config(dtype="bfloat16", num_attention_heads=4, num_key_value_heads=2)
    write_checkpoint(tmp_path, config, tiny_tensors(config))
    costs = []
    for parallelism in (Parallelism(2, 2), Parallelism(2, 2, rank_slice=0)):
        rank = build_model(tmp_path, "auto", parallelism).ranks[0]
        costs.append(by_label(step_cost(rank.decode, 5, 5, [7] * 5))["layers.1.mlp.norm"].total_bytes)
    assert costs[0] == costs[1]
