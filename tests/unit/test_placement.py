"""Placement files: which are refused and why; and that one made of recorded loads evens them out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from engine_worker.errors import ConfigError
from engine_worker.models import ModelConfig, Parallelism, build_model
from engine_worker.models.placement import (
    ExpertPlacement,
    balanced,
    even_groups,
    group_loads,
    imbalance,
    read_placement,
)
from tests.unit.checkpoint_files import tiny_config, tiny_tensors, write_checkpoint


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    """Layer 1 of 2 has 4 experts."""
    raw = tiny_config(num_attention_heads=4, num_key_value_heads=2)
    write_checkpoint(tmp_path, raw, tiny_tensors(raw))
    return build_model(tmp_path).config


def test_hot_neighbours_are_spread() -> None:
    counts = [40, 30, 20, 10, 1, 1, 1, 1]
    placement = balanced({5: counts}, 2)
    assert placement.layers[5] == ((0, 3, 4, 6), (1, 2, 5, 7))
    assert group_loads(counts, placement.layers[5]) == [52, 52]
    assert imbalance(group_loads(counts, even_groups(8, 2))) == pytest.approx(100 / 52)


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_groups_stay_equal_in_number_and_get_no_worse(ep: int) -> None:
    rng = random.Random(ep)
    counts = [int(1e4 / (1 + rng.randrange(160))) for _ in range(160)]
    groups = balanced({3: counts}, ep).layers[3]
    assert sorted(expert for group in groups for expert in group) == list(range(160))
    assert {len(group) for group in groups} == {160 // ep}
    assert imbalance(group_loads(counts, groups)) <= imbalance(group_loads(counts, even_groups(160, ep)))


def test_a_file_reads_back(tmp_path: Path, config: ModelConfig) -> None:
    placement = ExpertPlacement({1: ((3, 0), (1, 2))})
    path = tmp_path / "placement.json"
    path.write_text(placement.text())
    read = read_placement(path)
    assert read == placement
    assert read.digest == placement.digest
    assert (read.of_layer(1), read.of_layer(0)) == ((3, 0, 1, 2), None)
    read.check(config, 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({0: ((0, 1), (2, 3))}, "layer 0 has no experts: those with experts are 1 to 1"),
        ({2: ((0, 1), (2, 3))}, "layer 2 has no experts"),
        ({1: ((0, 1, 2, 3),)}, "layer 1 has 1 groups, this layout has ep=2"),
        ({1: ((0, 1, 2), (3,))}, "layer 1, group 0 has 3 experts, expected 2"),
        ({1: ((0, 1), (2, 4))}, "layer 1, group 1: expert 4, the model has 0 to 3"),
        ({1: ((0, 1), (2, -1))}, "layer 1, group 1: expert -1"),
        ({1: ((0, 1), (2, 0))}, "layer 1: expert 0 is placed twice"),
    ],
)
def test_what_is_wrong_is_named_with_the_remedy(config: ModelConfig, layers: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Parallelism(2, 2, placement=ExpertPlacement(layers)).layouts(config)
    assert message in str(raised.value)
    assert "glm plan place --ep N" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "placement.json: Expecting"),
        ("[]", 'expected {"version": 1, "layers"'),
        ('{"version": 2, "layers": {}}', 'expected {"version": 1, "layers"'),
        ('{"version": 1, "layers": {"x": []}}', "layer 'x': expected its number and lists of expert ids"),
        ('{"version": 1, "layers": {"1": [[0, true]]}}', "layer '1': expected its number and lists"),
        ('{"version": 1, "layers": {"1": [0, 1]}}', "layer '1': expected its number and lists"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "placement.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_placement(path)
    assert message in str(raised.value)


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", "place", *args])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_what_a_worker_takes(tmp_path: Path, config: ModelConfig) -> None:
    loads, out = tmp_path / "loads.json", tmp_path / "placement.json"
    loads.write_text(json.dumps({"version": 1, "layers": {"1": [60, 30, 5, 5]}}))
    code, text, _ = run("--loads", str(loads), "--ep", "2", "--out", str(out))
    assert code == 0
    assert text.splitlines() == [
        "1 layers, 2 groups; busiest group over mean:",
        "in order of id 1.800 (mean of layers), 1.800 (layer 1)",
        "placed         1.300 (mean of layers), 1.300 (layer 1)",
    ]
    read_placement(out).check(config, 2)


@pytest.mark.parametrize(
    ("layers", "ep", "message"),
    [
        ({"1": [1, 2, 3]}, "2", "layer 1: 3 experts do not divide into 2 groups"),
        ({"1": [1, -2]}, "2", "layer '1': expected its number and tokens of each expert"),
        ({}, "2", "no layers: a worker keeps such a file with --expert-loads"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path: Path, layers: dict[str, Any], ep: str, message: str) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps({"version": 1, "layers": layers}))
    code, _, err = run("--loads", str(loads), "--ep", ep, "--out", str(tmp_path / "out"))
    assert code == 2
    assert message in err
    code, _, err = run("--loads", str(tmp_path / "none"), "--ep", "2", "--out", str(tmp_path / "out"))
    assert code == 2 and "No such file" in err
