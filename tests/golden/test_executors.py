"""A compiled driver computes what the built-in executor does, bit for bit: every checkpoint, several ranks, both
exchanges, chunks and decode, sampled tokens. The kernels are the same, so anything else is a wrong argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from engine_worker.driver.compile import ExecutorSetting, with_executor
from engine_worker.models import Model
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import RankOptions, Sampling
from tests.golden import session
from tests.golden.cases import CASES
from tests.golden.session import Logits, generate
from tests.golden.table import most_ranks
from tests.golden.test_parallel import BY_NAME, tokens_of
from tests.terra_toolchain import drivers_kept_in, needs_terra

pytestmark = needs_terra

SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=3)
ALL_TO_ALL = Exchanges("all_to_all", "all_to_all")
SEVERAL = [
    ("f32_8_kv_heads", 2, 1, REPLICATED),
    ("f32_8_kv_heads", 2, 2, REPLICATED),
    ("f32_8_kv_heads", 2, 2, ALL_TO_ALL),
    ("fp8_channel_8_kv_heads", 4, 4, ALL_TO_ALL),
    ("bf16_3_kv_heads", 3, 3, ALL_TO_ALL),
    ("fp8_block_wide", 2, 2, Exchanges("all_to_all", "replicate")),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with drivers_kept_in(tmp_path_factory.mktemp("cache")):
        yield


def run(
    monkeypatch: pytest.MonkeyPatch,
    executor: ExecutorSetting,
    name: str,
    parallelism: Parallelism = ONE_RANK,
    exchanges: Exchanges = REPLICATED,
) -> tuple[list[Logits], Sequence[Sequence[int]]]:
    """Logits of decode and of chunks; what is sampled, greedily and not."""

    def driven(model: Model, first_gpu: int | None = None) -> list[RankOptions]:
        return with_executor(rank_options(model, first_gpu), executor)

    monkeypatch.setattr(session, "rank_options", driven)
    tokens = tokens_of(name)
    with session.open_session(BY_NAME[name].directory, parallelism=parallelism, exchanges=exchanges) as opened:
        logits = [opened.decode(tokens), opened.prefill(tokens, [16, 16, 17]), opened.prefill(tokens, [1, 48])]
        texts = []
        for sampling in (Sampling(), SAMPLED):
            text, of_text = generate(opened, tokens[:16], 16, sampling)
            texts.append(text)
            logits.extend(of_text)
        return logits, texts


def assert_same(
    monkeypatch: pytest.MonkeyPatch,
    executor: ExecutorSetting,
    name: str,
    parallelism: Parallelism = ONE_RANK,
    exchanges: Exchanges = REPLICATED,
) -> None:
    wanted, texts = run(monkeypatch, "native", name, parallelism, exchanges)
    found, same = run(monkeypatch, executor, name, parallelism, exchanges)
    assert same == texts
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_every_checkpoint(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert_same(monkeypatch, "terra", name)


@pytest.mark.parametrize(("name", "tp", "ep", "exchanges"), SEVERAL)
def test_several_ranks(monkeypatch: pytest.MonkeyPatch, name: str, tp: int, ep: int, exchanges: Exchanges) -> None:
    if tp > most_ranks():
        pytest.skip(f"{tp} ranks need a GPU each, this machine has {most_ranks()}")
    assert_same(monkeypatch, "terra", name, Parallelism(tp, ep), exchanges)


@pytest.mark.parametrize(
    ("name", "tp", "exchanges"), [("fp8_block_wide", 1, REPLICATED), ("bf16_3_kv_heads", 3, ALL_TO_ALL)]
)
def test_debug_builds_find_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, tp: int, exchanges: Exchanges
) -> None:
    if tp > most_ranks():
        pytest.skip(f"{tp} ranks need a GPU each, this machine has {most_ranks()}")
    assert_same(monkeypatch, "terra-debug", name, Parallelism(tp, tp), exchanges)
