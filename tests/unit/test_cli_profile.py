"""`glm plan profile`: every op of the model's real plans, timed beside its floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy.cli.main import app
from tests.native.test_synthetic import config_directory


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", "profile", "--device", "cpu", *args])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(config_directory(tmp_path, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2))


def profile(model: str, *args: str) -> dict[str, Any]:
    code, out, err = run("--model", model, "--weights", "synthetic", "--threads", "1", "--json", *args)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize(
    ("args", "plan", "rows"), [(["--batch", "2"], "decode", 2), (["--batch", "2", "--prefill", "24"], "mixed", 48)]
)
def test_figures_of_each_op(model: str, args: list[str], plan: str, rows: int) -> None:
    found = profile(model, "--context", "40", *args)
    assert (found["plan"], found["rows"]) == (plan, rows)
    ops = {op["op"]: op for op in found["ops"]}
    qkv = ops["layers.*.attn.qkv"]
    assert qkv["calls"] == 3
    assert qkv["flops"] == 2 * 3 * rows * 128 * (4 + 2 * 2) * 32
    assert qkv["bytes_per_s"] == pytest.approx(qkv["bytes"] / qkv["seconds"])
    assert qkv["floor_s"] == pytest.approx(qkv["bytes"] / found["read_bytes_per_s"])
    assert sum(op["share"] for op in ops.values()) == pytest.approx(1)
    assert found["floor_s"] == pytest.approx(sum(op["floor_s"] for op in ops.values()))


def test_arithmetic_can_be_the_floor(model: str) -> None:
    slow = profile(model, "--context", "40", "--prefill", "40", "--gflops", "1")
    qkv = next(op for op in slow["ops"] if op["op"] == "layers.*.attn.qkv")
    assert qkv["floor_s"] == pytest.approx(qkv["flops"] / 1e9)


def test_every_label_and_a_rank(model: str) -> None:
    found = profile(model, "--context", "40", "--every-label", "--tp", "2")
    labels = [op["op"] for op in found["ops"]]
    assert "layers.2.attn.qkv" in labels
    assert "layers.*.attn.qkv" not in labels


def test_a_table_for_people(model: str) -> None:
    code, out, err = run("--model", model, "--weights", "synthetic", "--context", "16")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("cpu ")
    assert lines[1].startswith("step ")
    assert lines[2].split()[:3] == ["op", "kind", "calls"]
    assert lines[-1].startswith("head.sample")


def test_wrong_arguments_are_named(model: str) -> None:
    code, _, err = run("--model", model, "--prefill", "9", "--context", "8")
    assert code == 2
    assert "--prefill" in err
    code, _, err = run("--model", model, "--weights", "synthetic", "--tp", "3")
    assert code == 2
    assert "tp=3" in err
    code, _, err = run("--model", model)
    assert code == 2
    assert "neither model.safetensors.index.json nor model.safetensors is there" in err
