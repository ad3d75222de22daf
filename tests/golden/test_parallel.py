"""Several ranks compute what one does.

Sums over ranks are rounded once more than one rank's: f32 stays f32, bf16 differs by its own rounding. FP8 activations
that lie on several ranks (the inputs of the row-parallel matrices) are quantised with a scale for each rank's columns
instead of one for the row. That is another rounding, not a worse one: test_scales_of_shards_cost_no_accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine_worker.models import build_model
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.models.placement import ExpertPlacement
from engine_worker.runtime.records import Sampling
from tests.golden.cases import CASES
from tests.golden.dequantized import dequantize
from tests.golden.session import Logits, Piece, Tokens, generate, open_session, relative_error
from tests.golden.table import most_ranks


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    tp = callspec.params.get("tp", 1) if callspec is not None else 1
    if tp > most_ranks():
        pytest.skip(f"{tp} ranks need a GPU each, this machine has {most_ranks()}")


BY_NAME = {case.name: case for case in CASES}
UP_TO_8 = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8)]
LAYOUTS = {
    "f32_8_kv_heads": UP_TO_8,
    "f32_glm47": [(2, 2), (4, 1), (4, 4)],  # one KV head, on all ranks
    "f32_dense_tied": [(3, 1)],
    "bf16_3_kv_heads": [(3, 1), (3, 3), (6, 1), (6, 2), (6, 6)],
    "fp8_block_wide": [(2, 1), (2, 2)],
}
# Against one rank: |logits - one| / |one| at most.
TOLERANCE = {"f32": 2e-6, "bf16": 2.5e-2, "block": 2e-6}
FP8_TYPICAL = 7e-2  # the median, of checkpoints with scales per channel
PARAMETERS = [(name, tp, ep) for name, layouts in LAYOUTS.items() for tp, ep in layouts]


def tokens_of(name: str) -> Tokens:
    tokens: Tokens = np.load(BY_NAME[name].directory / "expected.npz")["token_ids"]
    return tokens


def decoded(name: str, parallelism: Parallelism = ONE_RANK) -> Logits:
    with open_session(BY_NAME[name].directory, parallelism=parallelism) as session:
        return session.decode(tokens_of(name))


@pytest.mark.parametrize(("name", "tp", "ep"), PARAMETERS)
def test_logits_are_those_of_one_rank(name: str, tp: int, ep: int) -> None:
    error = relative_error(decoded(name, Parallelism(tp, ep)), decoded(name))
    assert error.max() <= TOLERANCE[BY_NAME[name].weights], f"position {error.argmax()}"


@pytest.mark.parametrize(("name", "tp", "ep"), PARAMETERS)
def test_greedy_text_is_that_of_one_rank(name: str, tp: int, ep: int) -> None:
    """Up to where the two best tokens of one rank lie within the tolerance."""
    prompt = tokens_of(name)[:16]
    with open_session(BY_NAME[name].directory) as session:
        wanted, logits = generate(session, prompt, 24, Sampling())
    with open_session(BY_NAME[name].directory, parallelism=Parallelism(tp, ep)) as session:
        found, _ = generate(session, prompt, 24, Sampling())
    tolerance = TOLERANCE[BY_NAME[name].weights]
    near_tie = [i for i, row in enumerate(logits) if lead(row) <= 2 * tolerance * np.linalg.norm(row)]
    certain = near_tie[0] if near_tie else len(wanted)
    assert certain > 0 and found[:certain] == wanted[:certain]


def lead(row: Logits) -> float:
    second, first = np.sort(row)[-2:]
    return float(first - second)


@pytest.mark.parametrize(("tp", "ep"), UP_TO_8)
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, top_p=0.9, seed=3), Sampling(temperature=0.8, top_k=20, min_p=0.01, seed=4)]
)
def test_seeded_text_is_that_of_one_rank(tp: int, ep: int, sampling: Sampling) -> None:
    name = "f32_8_kv_heads"
    prompt = tokens_of(name)[:16]
    asked = replace(sampling, prompt_len=16, repetition_penalty=1.1, presence_penalty=0.2)
    texts = []
    for parallelism in (ONE_RANK, Parallelism(tp, ep)):
        with open_session(BY_NAME[name].directory, parallelism=parallelism) as session:
            texts.append(generate(session, prompt, 24, asked)[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "tp"),
    [("f32_8_kv_heads", 2), ("f32_8_kv_heads", 4), ("bf16_3_kv_heads", 6), ("fp8_channel_8_kv_heads", 4)],
)
def test_chunks_and_company_do_not_matter(name: str, tp: int) -> None:
    """Bit for bit, with ranks as without: sums are in order of rank."""
    tokens = tokens_of(name)
    with open_session(BY_NAME[name].directory, parallelism=Parallelism(tp, 2)) as session:
        alone = session.decode(tokens)
        for chunks in ([49], [16, 16, 17], [1, 48], [5] * 9 + [4]):
            np.testing.assert_array_equal(session.prefill(tokens, chunks), alone[-1])
        other = tokens[::-1].copy()
        session.start(0)
        session.start(1)
        for i in range(16):
            logits = session.step(Piece(0, tokens[i : i + 1], i), Piece(1, other[3 * i : 3 * i + 3], 3 * i))
            np.testing.assert_array_equal(logits[0], alone[i])


@pytest.mark.parametrize("tp", [2])
def test_threads_of_a_rank_do_not_matter(tp: int) -> None:
    name = "f32_8_kv_heads"
    with open_session(BY_NAME[name].directory, num_threads=8, parallelism=Parallelism(tp, tp)) as session:
        np.testing.assert_array_equal(session.decode(tokens_of(name)), decoded(name, Parallelism(tp, tp)))


@pytest.mark.parametrize(("tp", "ep"), UP_TO_8)
def test_scales_of_shards_cost_no_accuracy(tmp_path: Path, tp: int, ep: int) -> None:
    """Logits are as near to those of unquantised activations as with one scale for the row."""
    case = BY_NAME["fp8_channel_8_kv_heads"]
    with open_session(dequantize(case.directory, tmp_path / "f32")) as session:
        exact = session.decode(tokens_of(case.name))
    one, many = decoded(case.name), decoded(case.name, Parallelism(tp, ep))
    assert typical(many, exact) <= 1.1 * typical(one, exact)
    assert typical(many, one) <= FP8_TYPICAL


def typical(found: Logits, expected: Logits) -> float:
    return float(np.median(relative_error(found, expected)))


@pytest.mark.parametrize("rank", range(4))
def test_a_slice_runs_by_itself(rank: int) -> None:
    name = "fp8_channel_8_kv_heads"
    with open_session(BY_NAME[name].directory, parallelism=Parallelism(4, 4, rank)) as session:
        logits = session.decode(tokens_of(name))
        sampled: Sequence[int] = session.sampled.tolist()
    first = [0, 24, 52, 76][rank]
    assert np.isfinite(logits).all()
    assert sampled == [first + int(logits[-1].argmax())]


@pytest.mark.parametrize("tp", [2, 8])
def test_narrow_cache_on_ranks(tp: int) -> None:
    name = "f32_8_kv_heads"
    with open_session(BY_NAME[name].directory, "fp8") as session:
        one = session.decode(tokens_of(name))
    with open_session(BY_NAME[name].directory, "fp8", parallelism=Parallelism(tp, tp)) as session:
        error = relative_error(session.decode(tokens_of(name)), one)
    assert np.median(error) <= TOLERANCE["f32"]  # a key near the middle of two codes may take the other


@pytest.mark.parametrize("name", ["f32_8_kv_heads", "fp8_block_wide"])
def test_a_placement_does_not_change_one_ranks_bits(name: str) -> None:
    np.testing.assert_array_equal(decoded(name, Parallelism(placement=shuffled(name, 1))), decoded(name))


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 2), (4, 4)])
def test_a_placement_changes_the_rounding_of_sums_only(tp: int, ep: int) -> None:
    name = "f32_8_kv_heads"
    error = relative_error(decoded(name, Parallelism(tp, ep, placement=shuffled(name, ep))), decoded(name))
    assert error.max() <= TOLERANCE["f32"]


def shuffled(name: str, ep: int) -> ExpertPlacement:
    c = build_model(BY_NAME[name].directory).config
    rng = np.random.default_rng(ep)
    layers = range(c.first_k_dense_replace, c.num_hidden_layers)
    orders = {layer: rng.permutation(c.n_routed_experts).reshape(ep, -1).tolist() for layer in layers}
    return ExpertPlacement({layer: tuple(map(tuple, groups)) for layer, groups in orders.items()})
