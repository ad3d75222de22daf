"""A worker without a checkpoint: `--weights synthetic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_worker.config import WorkerConfig
from engine_worker.errors import CheckpointError
from engine_worker.loading import load
from tests.native.test_synthetic import config_directory, greedy


def settings(directory: Path, *more: str) -> WorkerConfig:
    sizes = ["--device", "cpu", "--max-running", "2", "--step-tokens", "64", "--max-context", "128"]
    return WorkerConfig.load(["--model", str(directory), "--kv-memory-mb", "1", *sizes, *more], prog="glm worker")


def test_a_config_alone_serves(tmp_path: Path) -> None:
    directory = config_directory(tmp_path, num_hidden_layers=3)
    said: list[tuple[int, int]] = []
    found = []
    for seed in ("0", "0", "1"):
        config = settings(directory, "--weights", "synthetic", "--synthetic-seed", seed)
        with load(config, lambda done, total: said.append((done, total))).engine as engine:
            found.append(greedy(engine))
    assert found[0] == found[1] != found[2]
    assert said[-1][0] == said[-1][1] > 0


def test_synthetic_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor"):
        load(settings(config_directory(tmp_path)), lambda done, total: None)
