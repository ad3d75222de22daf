"""What each rank of a layout holds: together the whole model, and each part once."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from engine_worker.errors import ConfigError
from engine_worker.models import Model, ModelConfig, Parallelism, build_model
from engine_worker.models.layout import Layout, check_layout
from engine_worker.models.placement import ExpertPlacement
from engine_worker.plan.dump import dump
from engine_worker.plan.record import Op, Plan
from engine_worker.weights.records import Experts, Matrix, Placement
from tests.unit.checkpoint_files import CHANNEL_QUANTIZATION, tiny_config, tiny_tensors, write_checkpoint

# 8 query heads on 4 KV heads, 8 experts of width 24, dense width 48, 97 tokens.
CHANGES: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "vocab_size": 97,
}
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)]


def make(directory: Path, parallelism: Parallelism, **changes: Any) -> Model:
    config = tiny_config(**{**CHANGES, **changes})
    dtype = "F8_E4M3" if config.get("quantization_config") else "BF16"
    write_checkpoint(directory, config, tiny_tensors(config, dtype))
    return build_model(directory, "auto", parallelism)


def elements(plan: Plan) -> Counter[tuple[str, int, int]]:
    """(tensor, row, column) of every element that the plan's rank holds of matrices and experts."""
    found: Counter[tuple[str, int, int]] = Counter()
    for weight in plan.weights:
        if isinstance(weight, Matrix):
            for part in weight.parts:
                found.update((part.tensor, r, c) for r in range(*part.rows) for c in range(*part.cols))
        elif isinstance(weight, Experts):
            rows, cols = range(weight.row, weight.row + weight.rows), range(weight.col, weight.col + weight.cols)
            for place in range(weight.first, weight.first + weight.count):
                e = weight.placement.experts[place] if weight.placement else place
                found.update((weight.tensor.format(e=e), r, c) for r in rows for c in cols)
    return found


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
def test_ranks_hold_the_model_together(tmp_path: Path, tp: int, ep: int) -> None:
    whole = elements(make(tmp_path / "one", Parallelism()).decode)
    ranks = [elements(rank.decode) for rank in make(tmp_path / "many", Parallelism(tp, ep)).ranks]
    held = sum(ranks, Counter())
    assert held.keys() == whole.keys()
    for (tensor, *_), count in held.items():
        replicated = "embed_tokens" in tensor or "mlp.gate." in tensor
        kv_copies = max(1, tp // 4) if ".k_proj" in tensor or ".v_proj" in tensor else 1
        assert count == (tp if replicated else kv_copies), tensor


def test_expert_groups_cut_experts_among_their_ranks(tmp_path: Path) -> None:
    ranks = make(tmp_path, Parallelism(4, 2)).ranks
    gate = [next(w for w in rank.decode.weights if w.name == "layers.1.moe.gate") for rank in ranks]
    assert all(isinstance(weight, Experts) for weight in gate)
    found = [(w.first, w.count, w.row, w.rows, w.col, w.cols) for w in gate if isinstance(w, Experts)]
    assert found == [(0, 4, 0, 12, 0, 16), (0, 4, 12, 12, 0, 16), (4, 4, 0, 12, 0, 16), (4, 4, 12, 12, 0, 16)]


def test_vocabulary_shards_are_even_and_start_on_a_multiple_of_four(tmp_path: Path) -> None:
    config = make(tmp_path, Parallelism()).config
    shards = [Layout(8, 1, rank).vocab(config) for rank in range(8)]
    assert shards[0][0] == 0 and shards[-1][1] == 97
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shards))
    assert all(first % 4 == 0 and 9 <= end - first <= 16 for first, end in shards)


def test_ranks_record_the_same_calls(tmp_path: Path) -> None:
    ranks = make(tmp_path, Parallelism(4, 2)).ranks
    calls = [[(op.kind, op.label) for op in rank.mixed.ops] for rank in ranks]
    assert all(other == calls[0] for other in calls)
    assert [op.label for op in ranks[0].mixed.ops if "reduce" in op.args] == [
        "layers.0.mlp.norm",
        "layers.1.attn.norm",
        "layers.1.mlp.norm",
        "head.norm",
    ]


def without_reduce(op: Op) -> tuple[str, str, dict[str, object]]:
    return op.kind, op.label, {key: value for key, value in op.args.items() if key != "reduce"}


def test_a_slice_is_the_rank_without_exchanges(tmp_path: Path) -> None:
    rank = make(tmp_path / "all", Parallelism(4, 4)).ranks[3]
    (alone,) = make(tmp_path / "slice", Parallelism(4, 4, rank_slice=3)).ranks
    for plan, sliced in ((rank.mixed, alone.mixed), (rank.decode, alone.decode)):
        assert [without_reduce(op) for op in plan.ops] == [without_reduce(op) for op in sliced.ops]
        assert not any("reduce" in op.args for op in sliced.ops)
        assert plan.kv == sliced.kv and plan.vocab == sliced.vocab


def test_without_ep_experts_are_cut_as_little_as_possible(tmp_path: Path) -> None:
    config = make(tmp_path, Parallelism()).config
    assert {layout.ep for layout in Parallelism(8).layouts(config)} == {8}
    six = dataclasses.replace(config, n_routed_experts=6)
    assert {layout.ep for layout in Parallelism(4).layouts(six)} == {2}


def test_a_placement_says_which_experts_a_rank_holds_and_the_router_writes_their_places(tmp_path: Path) -> None:
    placement = ExpertPlacement({1: ((6, 1, 4, 3), (2, 5, 0, 7))})
    ranks = make(tmp_path, Parallelism(2, 2, placement=placement)).ranks
    held = [{int(t.split(".")[5]) for t, _, _ in elements(rank.decode) if ".experts." in t} for rank in ranks]
    assert held == [{6, 1, 4, 3}, {2, 5, 0, 7}]
    (route,) = [op for op in ranks[1].mixed.ops if op.kind == "moe_route"]
    assert route.args["placement"] == Placement("layers.1.moe.placement", (6, 1, 4, 3, 2, 5, 0, 7))
    assert "placement layers.1.moe.placement 8 experts=6,1,4,3,2,5,0,7\n" in dump(ranks[0].mixed)
    plain, placed = (make(tmp_path, Parallelism(2, 2, placement=p)).revision for p in (None, placement))
    assert plain != placed


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(0), "tp: 0, expected 1 to 64"),
        (Parallelism(65), "tp: 65, expected 1 to 64"),
        (Parallelism(4, 3), "ep: 3, expected a divisor of tp, which is 4"),
        (Parallelism(2, 0), "ep: 0, expected a divisor"),
        (Parallelism(2, 2, 2), "rank: 2, expected 0 to 1"),
        (Parallelism(2, 2, -1), "rank: -1, expected 0 to 1"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, parallelism: Parallelism, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, parallelism)


LISTED = r"layouts of this model: tp=1 ep=1, tp=2 ep=1\|2, tp=4 ep=1\|2\|4, tp=8 ep=1\|2\|4\|8$"


@pytest.mark.parametrize(
    ("tp", "ep", "changes", "message"),
    [
        (3, 1, {}, "tp=3 ep=1: num_attention_heads 8 is not a multiple of tp; " + LISTED),
        (16, None, {}, "tp=16 ep=1: num_attention_heads 8 is not a multiple of tp; " + LISTED),
        (2, 1, {"num_attention_heads": 6, "num_key_value_heads": 3}, "num_key_value_heads 3 and tp: neither"),
        (4, 1, {"intermediate_size": 45}, "intermediate_size 45 does not hold 16 for each of 4 ranks"),
        (2, 1, {"moe_intermediate_size": 15}, "moe_intermediate_size 15 does not hold 16 for each of 2 ranks"),
        (2, 2, {"moe_intermediate_size": 15}, "shared experts' width 15 does not hold 16 for each of 2 ranks"),
        (2, 2, {"n_routed_experts": 7}, "n_routed_experts 7 is not a multiple of ep"),
        (8, 8, {"vocab_size": 28}, "vocab_size 28 does not hold 4 for each of 8 ranks"),
    ],
)
def test_layouts_that_do_not_divide_are_refused_with_those_that_do(
    tmp_path: Path, tp: int, ep: int | None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, Parallelism(tp, ep), **changes)


def test_block_scales_are_not_cut(tmp_path: Path) -> None:
    config: ModelConfig = dataclasses.replace(
        make(tmp_path, Parallelism()).config,
        quantization="block",
        head_dim=128,
        intermediate_size=512,
        moe_intermediate_size=256,
    )
    check_layout(Layout(2, 2), config)
    assert Layout(2, 1, 1).width(512, config) == (256, 512)
    assert [Layout(2, 1, rank).width(392, config) for rank in (0, 1)] == [(0, 256), (256, 392)]
    with pytest.raises(
        ConfigError, match=r"moe_intermediate_size 256 does not hold 128 for each of 4 ranks; .*tp=4 ep=2"
    ):
        check_layout(Layout(4, 1), dataclasses.replace(config, n_shared_experts=2))
    with pytest.raises(ConfigError, match="query heads of a rank do not fill blocks of 128"):
        check_layout(Layout(2, 2), dataclasses.replace(config, head_dim=24))
    with pytest.raises(ConfigError, match="KV heads of a rank do not fill blocks of 128"):
        check_layout(Layout(2, 2), dataclasses.replace(config, head_dim=32))


def test_widths_that_do_not_divide_are_cut_in_sixteens(tmp_path: Path) -> None:
    config = make(tmp_path, Parallelism()).config
    assert [Layout(3, 1, rank).width(176, config) for rank in range(3)] == [(0, 48), (48, 112), (112, 176)]
    assert [Layout(2, 1, rank).width(57, config) for rank in range(2)] == [(0, 32), (32, 57)]


def test_a_layer_without_experts_asks_nothing_of_them(tmp_path: Path) -> None:
    changes = {"first_k_dense_replace": 2, "n_routed_experts": 7, "moe_intermediate_size": 1}
    assert len(make(tmp_path, Parallelism(2, 2), **changes).ranks) == 2


def test_fp8_scales_follow_their_rows(tmp_path: Path) -> None:
    model = make(tmp_path, Parallelism(2), dtype="bfloat16", quantization_config=CHANNEL_QUANTIZATION)
    scale = {operand.name: operand for operand in model.ranks[1].decode.buffers}["attn_scale"]
    assert scale.cols == 1  # of the rank's own columns
