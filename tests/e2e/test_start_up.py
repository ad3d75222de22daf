"""A checkpoint or a setting that cannot work stops the start with one clear line and exit code 2."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def start_worker(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine_worker", "--listen", "127.0.0.1:0", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def copy(model_dir: Path, tmp_path: Path) -> Path:
    """The model with files of its own where a test damages them, links elsewhere."""
    for source in model_dir.iterdir():
        if source.suffix == ".json":
            shutil.copy(source, tmp_path / source.name)
        elif source.is_file():
            (tmp_path / source.name).symlink_to(source)
    return tmp_path


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def no_shard(directory: Path) -> None:
    sorted(directory.glob("*.safetensors"))[-1].unlink()


def cut_shard(directory: Path) -> None:
    shard = sorted(directory.glob("*.safetensors"))[0]
    whole = shard.resolve()
    shard.unlink()
    with whole.open("rb") as source:
        shard.write_bytes(source.read(1 << 20))


def other_architecture(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(architectures=["Glm4MoeLiteForCausalLM"]))


def no_hidden_size(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.pop("hidden_size"))


def wrong_shape(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.update(moe_intermediate_size=160))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (no_shard, ".safetensors"),
        (cut_shard, ".safetensors"),
        (other_architecture, "Glm4MoeLiteForCausalLM"),
        (no_hidden_size, "hidden_size"),
        (wrong_shape, "proj.weight"),
    ],
)
def test_a_broken_checkpoint_is_named(copy: Path, damage: Callable[[Path], None], named: str) -> None:
    damage(copy)
    ended = start_worker("--model", str(copy))
    assert ended.returncode == 2
    assert named in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--max-running", "0"), "max_running"),
        (("--max-context", "1000000"), "max_context"),
        (("--kv-memory-mb", "1", "--kv-dtype", "f32"), "kv_memory_mb"),
    ],
)
def test_a_bad_setting_is_named(model_dir: Path, args: tuple[str, ...], named: str) -> None:
    ended = start_worker("--model", str(model_dir), *args)
    assert ended.returncode == 2
    assert named in ended.stderr.strip().splitlines()[-1]


def test_an_address_in_use_is_named(cluster: Any, model_dir: Path) -> None:
    ended = start_worker("--model", str(model_dir), "--listen", cluster.workers[0])
    assert ended.returncode == 2
    assert cluster.workers[0] in ended.stderr
