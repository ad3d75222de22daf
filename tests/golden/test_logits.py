"""The engine's logits are transformers', and do not depend on how a prompt is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.golden.cases import CASES, PROMPT_TOKENS, Case
from tests.golden.session import Logits, Piece, Session, Tokens, open_session, relative_error


@dataclass(frozen=True)
class Golden:
    case: Case
    session: Session
    tokens: Tokens
    expected: Logits  # [tokens][vocab]
    decoded: Logits  # [tokens][vocab], token by token


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def golden(request: pytest.FixtureRequest) -> Iterator[Golden]:
    case: Case = request.param
    stored = np.load(case.directory / "expected.npz")
    with open_session(case.directory) as session:
        decoded = session.decode(stored["token_ids"])
        yield Golden(case, session, stored["token_ids"], stored["logits"], decoded)


def test_logits_match_transformers(golden: Golden) -> None:
    error = relative_error(golden.decoded, golden.expected)
    assert error.max() <= golden.case.tolerance, f"position {error.argmax()}"
    assert np.median(error) <= golden.case.typical


def test_prefill_of_any_length_equals_decode(golden: Golden) -> None:
    """Bit for bit, at every page edge from 1 to 49 tokens."""
    for length in range(1, PROMPT_TOKENS + 1):
        np.testing.assert_array_equal(golden.session.prefill(golden.tokens[:length]), golden.decoded[length - 1])


def test_prefill_in_any_chunking_equals_decode(golden: Golden) -> None:
    for size in range(1, PROMPT_TOKENS + 1):
        full, rest = divmod(PROMPT_TOKENS, size)
        chunks = [size] * full + [rest] * (rest > 0)
        np.testing.assert_array_equal(golden.session.prefill(golden.tokens, chunks), golden.decoded[-1])
        np.testing.assert_array_equal(golden.session.prefill(golden.tokens, chunks[::-1]), golden.decoded[-1])


def test_slot_and_pages_do_not_matter(golden: Golden) -> None:
    np.testing.assert_array_equal(golden.session.decode(golden.tokens, slot=1), golden.decoded)


def test_company_in_the_step_does_not_matter(golden: Golden) -> None:
    """One sequence decodes while another, of other tokens, is prefilled in chunks of 3 in the same steps."""
    other = golden.tokens[::-1].copy()
    alone = golden.session.decode(other, slot=1)
    for slot in (0, 1):
        golden.session.start(slot)
    for i in range(PROMPT_TOKENS // 3):
        logits = golden.session.step(Piece(0, golden.tokens[i : i + 1], i), Piece(1, other[3 * i : 3 * i + 3], 3 * i))
        np.testing.assert_array_equal(logits, [golden.decoded[i], alone[3 * i + 2]])


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_chunking_does_not_matter_with_a_narrow_cache(case: Case, kv_dtype: str) -> None:
    tokens = np.load(case.directory / "expected.npz")["token_ids"]
    with open_session(case.directory, kv_dtype) as session:  # type: ignore[arg-type]
        decoded = session.decode(tokens)
        for chunks in ([49], [1] * 49, [16, 16, 16, 1], [17, 15, 17], [48, 1]):
            np.testing.assert_array_equal(session.prefill(tokens, chunks), decoded[-1])


# 8 bits of precision in keys and values, then 4.
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bf16", 2e-2), ("fp8", 2e-1)])
def test_narrow_cache_stays_near(kv_dtype: str, tolerance: float) -> None:
    case = next(case for case in CASES if case.name == "f32_dense_tied")
    stored = np.load(case.directory / "expected.npz")
    with open_session(case.directory, kv_dtype) as session:  # type: ignore[arg-type]
        error = relative_error(session.decode(stored["token_ids"]), stored["logits"])
    assert 0 < error.max() <= tolerance


def test_number_of_threads_does_not_matter() -> None:
    case = next(case for case in CASES if case.name == "fp8_channel_f32")
    tokens = np.load(case.directory / "expected.npz")["token_ids"]
    with open_session(case.directory, num_threads=1) as one, open_session(case.directory, num_threads=2) as two:
        np.testing.assert_array_equal(one.decode(tokens), two.decode(tokens))
