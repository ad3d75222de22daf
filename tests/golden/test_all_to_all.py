"""The exchange of tokens computes what ranks that have all tokens compute, whoever has which expert.

A token's experts are combined on one rank, in its own order, and rounded once: what one rank does. So placements do not
change a bit, and sums over ranks are left after attention only.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine_worker.models.exchange import Exchanges
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.runtime.records import Sampling
from tests.golden.session import Logits, Piece, generate, open_session, relative_error
from tests.golden.test_parallel import BY_NAME, FP8_TYPICAL, TOLERANCE, gpus, shuffled, tokens_of

__all__ = ["gpus"]  # a fixture of every test here too

BOTH = Exchanges("all_to_all", "all_to_all")
LAYOUTS = [
    *(("f32_8_kv_heads", tp) for tp in (2, 4, 8)),
    *(("bf16_3_kv_heads", tp) for tp in (3, 6)),
    ("fp8_block_wide", 2),
]


def decoded(name: str, parallelism: Parallelism = ONE_RANK, exchanges: Exchanges = BOTH) -> Logits:
    with open_session(BY_NAME[name].directory, parallelism=parallelism, exchanges=exchanges) as session:
        return session.decode(tokens_of(name))


@pytest.mark.parametrize(("name", "tp"), LAYOUTS)
def test_logits_are_those_of_one_rank(name: str, tp: int) -> None:
    error = relative_error(decoded(name, Parallelism(tp, tp)), decoded(name))
    assert error.max() <= TOLERANCE[BY_NAME[name].weights], f"position {error.argmax()}"


@pytest.mark.parametrize("tp", [2, 4])
def test_scales_of_channels_differ_as_they_do_without(tp: int) -> None:
    name = "fp8_channel_8_kv_heads"
    assert np.median(relative_error(decoded(name, Parallelism(tp, tp)), decoded(name))) <= FP8_TYPICAL


@pytest.mark.parametrize(("name", "tp"), [("f32_8_kv_heads", 4), ("bf16_3_kv_heads", 3), ("fp8_block_wide", 2)])
def test_a_placement_does_not_change_a_bit(name: str, tp: int) -> None:
    placed = decoded(name, Parallelism(tp, tp, placement=shuffled(name, tp)))
    np.testing.assert_array_equal(placed, decoded(name, Parallelism(tp, tp)))


@pytest.mark.parametrize(
    ("name", "tp"),
    [("f32_8_kv_heads", 4), ("bf16_3_kv_heads", 6), ("fp8_channel_8_kv_heads", 2), ("fp8_channel_8_kv_heads", 8)],
)
def test_chunks_and_company_do_not_matter(name: str, tp: int) -> None:
    """Bit for bit, though other ranks then have the rows to themselves; fewer rows than ranks included."""
    tokens = tokens_of(name)
    other = tokens[::-1].copy()
    with open_session(BY_NAME[name].directory, parallelism=Parallelism(tp, tp), exchanges=BOTH) as session:
        alone = session.decode(tokens)
        for chunks in ([49], [16, 16, 17], [1, 48], [5] * 9 + [4]):
            np.testing.assert_array_equal(session.prefill(tokens, chunks), alone[-1])
        for slot in (0, 1):
            session.start(slot)
        for i in range(4):
            pieces = Piece(0, tokens[i : i + 1], i), Piece(1, other[3 * i : 3 * i + 3], 3 * i)
            np.testing.assert_array_equal(session.step(*pieces)[0], alone[i])


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("exchanges", [Exchanges("all_to_all", "replicate"), Exchanges("replicate", "all_to_all")])
def test_prefill_and_decode_may_exchange_differently(exchanges: Exchanges, tp: int) -> None:
    name = "f32_8_kv_heads"
    prompt = tokens_of(name)[:16]
    texts = []
    for chosen, parallelism in ((BOTH, ONE_RANK), (exchanges, Parallelism(tp, tp))):
        with open_session(BY_NAME[name].directory, parallelism=parallelism, exchanges=chosen) as session:
            texts.append(generate(session, prompt, 24, Sampling(temperature=1.0, top_p=0.9, seed=3))[0])
    assert texts[0] == texts[1]
