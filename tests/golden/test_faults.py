"""Faults that other engines shipped: the logits are those of the right model and far from those that the fault gives.

make_checkpoints.py computed the latter, with the fault put into transformers' own model.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.golden.cases import CASES, Case
from tests.golden.session import Logits, open_session, relative_error

BY_NAME = {case.name: case for case in CASES}


def decoded(case: Case) -> tuple[Logits, dict[str, Logits]]:
    stored = np.load(case.directory / "expected.npz")
    with open_session(case.directory) as session:
        return session.decode(stored["token_ids"]), dict(stored)


def check(name: str, *faults: str) -> None:
    found, stored = decoded(BY_NAME[name])
    assert relative_error(found, stored["logits"]).max() <= BY_NAME[name].tolerance
    for fault in faults:
        assert relative_error(found, stored[f"fault_{fault}"]).max() > 0.05, fault


def test_correction_bias_is_not_rounded_to_bf16() -> None:
    check("f32_correction_bias", "bias_bf16")


def test_scores_are_not_recovered_from_biased_scores() -> None:
    """(s + 11.3) - 11.3 is 0 for s = sigmoid(-30)."""
    check("f32_small_scores", "score_from_bias")


def test_routed_scaling_factor_is_applied_once() -> None:
    check("f32_glm47", "scaling_missing", "scaling_twice")


def test_partial_rotary_factor_is_heeded() -> None:
    config = json.loads((BY_NAME["f32_glm47"].directory / "config.json").read_text())
    assert config["rope_scaling"] is None and config["partial_rotary_factor"] == 0.5
    check("f32_glm47", "full_rotary")


def test_experts_outside_the_chosen_groups_take_no_part() -> None:
    check("f32_groups", "ungrouped")


@pytest.mark.parametrize("name", ["f32_odd_sizes", "fp8_channel_odd_sizes", "fp8_block"])
def test_sizes_that_divide_no_tile(name: str) -> None:
    config = json.loads((BY_NAME[name].directory / "config.json").read_text())
    tile = 128 if name == "fp8_block" else 8
    assert all(config[key] % tile for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"))
    check(name)


def test_twelve_query_heads_to_a_kv_head() -> None:
    config = json.loads((BY_NAME["f32_glm47"].directory / "config.json").read_text())
    assert config["num_attention_heads"] == 12 * config["num_key_value_heads"]
    check("f32_glm47")
