"""What eight GPUs should do, from the plan of GLM-4.7-FP8's published shapes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.capacity import BEYOND_FLOOR, GPUS, SUM_SECONDS, capacity
from deploy.cli.main import app
from engine_worker.models import Parallelism, RankPlans, build_model

CONFIG = Path(__file__).parents[1] / "bench" / "data" / "glm-4.7-fp8.config.json"
PAGE = Path(__file__).parents[2] / "deploy" / "CAPACITY.md"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("glm-4.7")
    shutil.copyfile(CONFIG, directory / "config.json")
    return directory


@pytest.fixture(scope="module")
def rank(directory: Path) -> RankPlans:
    return build_model(directory, "auto", Parallelism(8, 8), 0).ranks[0]


def test_weights_of_a_rank_are_an_eighth_and_what_every_rank_holds(rank: RankPlans) -> None:
    found = capacity(rank, GPUS["h100"], batch=1, context=128)
    # 355 billion parameters of a byte each, most of them experts; embedding and router are on every rank.
    assert 355e9 / 8 < found.weights < 355e9 / 8 + 4e9


def test_kv_room_is_what_the_memory_leaves(rank: RankPlans) -> None:
    found = capacity(rank, GPUS["h100"], batch=1, context=128)
    # 92 layers x K and V x 1 head of 128 x 2 bytes.
    per_token = 92 * 2 * 128 * 2
    assert (found.kv_tokens + 1) * per_token > 80e9 - 3e9 - found.weights - found.buffers >= found.kv_tokens * per_token


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_a_step_is_the_floor_what_operations_took_beyond_it_and_the_sums(rank: RankPlans, batch: int) -> None:
    found = capacity(rank, GPUS["h100"], batch=batch, context=1024)
    beyond = len(rank.decode.ops) * dict(BEYOND_FLOOR)[batch]
    assert found.step_s == pytest.approx(found.floor_s + beyond + found.sums_s)
    assert found.tokens_per_s == pytest.approx(batch / found.step_s)


def test_two_sums_a_layer(rank: RankPlans) -> None:
    found = capacity(rank, GPUS["h100"], batch=64, context=1024)
    assert found.sums_s == pytest.approx(2 * 92 * dict(SUM_SECONDS)[64 * 5120 * 2])


def test_one_gpu_does_not_hold_the_model(directory: Path) -> None:
    alone = build_model(directory, "auto", Parallelism(1, 1), 0).ranks[0]
    with pytest.raises(ValueError, match="0.0 GB are left"):
        capacity(alone, GPUS["b200"], batch=1, context=128)


def test_sequences_that_do_not_fit_are_refused(rank: RankPlans) -> None:
    with pytest.raises(ValueError, match="256 sequences of 8192 tokens need 98.8 GB of K and V a rank"):
        capacity(rank, GPUS["h100"], batch=256, context=8192)


def test_a_faster_memory_gives_more_tokens(rank: RankPlans) -> None:
    rates = [capacity(rank, GPUS[name], batch=64, context=1024).tokens_per_s for name in ("h100", "h200", "b200")]
    assert rates == sorted(rates)


def test_the_command_prints_it(directory: Path) -> None:
    args = ["plan", "cost", "--model", str(directory), "--weights", "synthetic", "--gpus", "8", "--device", "h200"]
    result = CliRunner().invoke(app, [*args, "--batch", "64", "--context", "1024"])
    assert result.exit_code == 0, result.output
    assert "8 x h200, decode of 64 sequences of 1024 tokens:" in result.output


def test_the_command_refuses_what_does_not_fit(directory: Path) -> None:
    args = ["plan", "cost", "--model", str(directory), "--weights", "synthetic", "--gpus", "8", "--device", "h100"]
    result = CliRunner().invoke(app, [*args, "--batch", "256", "--context", "8192"])
    assert result.exit_code == 2


BATCHES = (1, 16, 64, 128, 256)


def page_row(rank: RankPlans, kv_dtype: str, name: str, context: int) -> str:
    """A line of the capacity page."""
    cells = [f"{capacity(rank, GPUS[name], batch=1, context=128).kv_tokens:,}"]
    for batch in BATCHES:
        try:
            cells.append(f"{capacity(rank, GPUS[name], batch=batch, context=context).tokens_per_s:,.0f}")
        except ValueError:
            cells.append("does not fit")
    return f"| {name.upper()}, context {context:,} | {kv_dtype} | {' | '.join(cells)} |"


def test_the_page_says_what_the_cost_model_says(directory: Path, rank: RankPlans) -> None:
    given = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [BH]\d+,", line)]
    # What the checkpoint says of K and V is bf16.
    plans = {"bf16": rank, "fp8": build_model(directory, "fp8", Parallelism(8, 8), 0).ranks[0]}
    wanted = [
        page_row(plans[kv_dtype], kv_dtype, name, context)
        for context in (1024, 4096)
        for name in GPUS
        for kv_dtype in plans
    ]
    assert given == wanted, f"{PAGE} is out of date: put these lines into it"
