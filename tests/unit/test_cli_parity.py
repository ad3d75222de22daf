"""`glm plan parity`: two kernel tables, op by op."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from deploy.cli.main import app
from tests.native.test_synthetic import config_directory


def run(directory: Path, *args: str) -> tuple[int, str, str]:
    common = ["--model", str(directory), "--weights", "synthetic", "--prompt-tokens", "17"]
    result = CliRunner().invoke(app, ["plan", "parity", *common, *args])
    return result.exit_code, result.stdout, result.stderr


def test_a_table_agrees_with_itself(tmp_path: Path) -> None:
    code, out, err = run(config_directory(tmp_path, num_hidden_layers=2), "--kernels", "cpu", "--steps", "2")
    assert code == 0, err
    header, *rows, summary = out.splitlines()
    assert header.split() == ["op", "worst", "at", "output", "error"]
    assert {row.split()[0] for row in rows} >= {"embed", "linear", "paged_attention", "moe_gate_up"}
    assert all(row.split()[-1] == "0" for row in rows)
    assert summary.startswith("cpu agrees with cpu: 3 steps, ")
