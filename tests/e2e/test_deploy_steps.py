"""`glm deploy` on the embedded model, with a directory as volume."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy.errors import ModelError
from deploy.local import LocalCluster
from deploy.models.catalog import DEFAULT_MODEL
from deploy.steps.benchmark import Cases, pair_for
from deploy.steps.smoke import SmokeError, smoke
from deploy.steps.validate import Serving, validate
from engine_worker.config import WorkerConfig


@pytest.fixture
def volume(model_dir: Path, tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / DEFAULT_MODEL).symlink_to(model_dir)
    return tmp_path


def glm_deploy(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["glm", "deploy", *args], capture_output=True, text=True, check=False, timeout=120)


def test_validation_reports_the_memory_of_each_rank(volume: Path) -> None:
    done = glm_deploy("validate", "--volume", str(volume), "--tp", "3", "--sequences", "4", "--context", "100")
    assert done.returncode == 0, done.stderr
    report = json.loads((volume / "reports" / DEFAULT_MODEL / "validate.json").read_text())
    assert json.loads(done.stdout) == report
    assert len(report["ranks"]) == 3
    # 30 layers x K and V x 1 head of 128 x 2 bytes, 4 sequences of 7 pages of 16 tokens.
    assert report["ranks"][0]["kv_pages"] == 30 * 2 * 128 * 2 * 4 * 7 * 16


def test_a_checkpoint_without_one_of_its_tensors_is_refused(model_dir: Path, tmp_path: Path) -> None:
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    lost = "model.layers.7.self_attn.o_proj.weight"
    del index["weight_map"][lost]
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=lost):
        validate(tmp_path, Serving())


def test_ranks_that_do_not_divide_the_model_are_refused(model_dir: Path) -> None:
    with pytest.raises(ModelError, match="tp"):
        validate(model_dir, Serving(tp=7))


def test_smoke_passes_and_says_what_it_read(model_dir: Path) -> None:
    report = smoke(model_dir)
    assert "Paris" in report["text"]
    assert report["completion_tokens"] > 0


def test_smoke_fails_on_another_answer(model_dir: Path) -> None:
    with pytest.raises(SmokeError, match="which lacks 'Berlin': the model does not work"):
        smoke(model_dir, expected="Berlin")


def test_benchmark_writes_figures_and_plots(volume: Path, cluster: LocalCluster) -> None:
    cases = ("--prefill", "8,16", "--batch", "1,2", "--context", "4", "--output-tokens", "4")
    done = glm_deploy("benchmark", "--volume", str(volume), "--target", cluster.router, *cases)
    assert done.returncode == 0, done.stderr
    report = json.loads((volume / "reports" / DEFAULT_MODEL / "benchmark.json").read_text())
    assert [case["prompt_tokens"] for case in report["prefill"]] == [8, 16]
    assert [case["batch"] for case in report["decode"]] == [1, 2]
    assert all(case["tokens_per_s"] > 0 for case in (*report["prefill"], *report["decode"]))
    assert all((volume / "reports" / DEFAULT_MODEL / name).is_file() for name in ("decode.png", "prefill.png"))


def test_benchmark_starts_a_worker_with_room_for_its_cases(volume: Path) -> None:
    """More sequences than a worker runs by itself."""
    cases = ("--prefill", "8", "--batch", "65", "--context", "2", "--output-tokens", "3")
    done = glm_deploy("benchmark", "--volume", str(volume), *cases)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["decode"][0]["batch"] == 65


@pytest.mark.parametrize(
    ("cases", "room"),
    [
        (Cases(prefill_tokens=(8, 4096), batches=(1, 4)), (4112, 4, 512)),
        (Cases(prefill_tokens=(8,), batches=(600,), context=8000, output_tokens=193), (8208, 600, 1200)),
    ],
)
def test_the_worker_has_room_for_the_cases(cases: Cases, room: tuple[int, int, int], model_dir: Path) -> None:
    args = pair_for(model_dir, cases, ["--tp", "1"]).worker_args
    config = WorkerConfig.load(["--model", str(model_dir), *args], prog="glm worker")
    assert (config.max_context, config.max_running, config.step_tokens) == room


def test_the_cases_by_default_fit_a_worker_by_default() -> None:
    config, cases = WorkerConfig.model_fields, Cases()
    assert max(*cases.prefill_tokens, cases.context + cases.output_tokens - 1) < 4096
    assert max(cases.batches) <= config["max_running"].default


def test_a_checkpoint_that_was_not_downloaded(tmp_path: Path) -> None:
    done = glm_deploy("smoke", "--volume", str(tmp_path))
    assert done.returncode == 2
    assert "`glm deploy download` first" in done.stderr
