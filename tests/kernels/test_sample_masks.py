"""Masks and forced tokens."""

from typing import Any

import numpy as np
import pytest

from tests.kernels import oracle_sample
from tests.kernels.cases_sample import SETTINGS, SampleProblem, coarse, counted, peaked, request
from tests.kernels.harness import Device
from tests.kernels.test_sample import check


def masked(rng: np.random.Generator, vocab: int, settings: dict[str, Any], samples: int = 8) -> SampleProblem:
    """Masks of every density, some samples without one; the slots are not in order."""
    requests = [request(**{"seed": 5 + i, "num_logprobs": 2, "prompt_len": 4, **settings}) for i in range(samples)]
    allowed = [None if i % 3 == 0 else rng.random(vocab) < 0.5**i for i in range(samples)]
    allowed[1] = np.arange(vocab) % 64 < 32  # words that are all or nothing
    slots = rng.permutation(samples + 1)[:samples].tolist()
    counts = counted(rng, samples + 1, vocab)
    positions = rng.integers(4, 3000, samples).tolist()
    return SampleProblem(peaked(rng, samples, vocab), requests, positions, counts, slots, allowed=allowed)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 257, 8195, 49152])
@pytest.mark.parametrize("name", SETTINGS)
def test_only_tokens_of_the_mask_are_drawn(device: Device, rng: np.random.Generator, name: str, vocab: int) -> None:
    problem = masked(rng, vocab, SETTINGS[name])
    check(device, problem)
    for token, allowed in zip(problem.run(device).tokens, problem.allowed, strict=True):
        assert allowed is None or token == -1 or allowed[token]


def test_bias_does_not_lift_a_token_over_the_mask(device: Device, rng: np.random.Generator) -> None:
    allowed = np.arange(100) == 7
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.1}]
    for settings in kinds:
        asked = request(**{"bias": [(3, 100.0)], **settings})
        assert SampleProblem(coarse(rng, 1, 100), [asked], [4], allowed=[allowed]).run(device).tokens[0] == 7


def test_a_mask_without_a_possible_token_gives_none(device: Device, rng: np.random.Generator) -> None:
    logits = coarse(rng, 3, 100)
    logits[1, 40] = np.nan
    logits[2, 40] = -np.inf
    only = np.arange(100) == 40
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_p": 0.5}]
    for settings in kinds:
        problem = SampleProblem(logits, [request(**settings)] * 3, [4, 5, 6], allowed=[np.zeros(100, bool), only, only])
        result = problem.run(device)
        assert result.tokens.tolist() == [-1, -1, -1]
        assert not result.counts.any()


def test_logprobs_are_of_the_models_own_logits(device: Device, rng: np.random.Generator) -> None:
    problem = masked(rng, 500, {"temperature": 0.5})
    result = problem.run(device)
    for sample, token in enumerate(result.tokens):
        if token < 0:
            continue
        expected = oracle_sample.log_softmax(problem.logits[sample])
        np.testing.assert_allclose(result.logprobs[sample], expected[token], atol=1e-5)
        assert result.top_ids[sample, :2].tolist() == oracle_sample.order(problem.logits[sample])[:2].tolist()


def test_a_masked_sample_is_the_same_alone_and_in_a_crowd(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    problem = masked(rng, 20000, {"top_p": 0.95}, samples=9)
    crowd, elsewhere = problem.run(device), problem.run(other_device)
    for sample in range(9):
        alone = problem.only(sample).run(device)
        for result in (crowd, elsewhere):
            assert alone.tokens[0] == result.tokens[sample]
            assert alone.logprobs[0].tobytes() == result.logprobs[sample].tobytes()


@pytest.mark.parametrize("vocab", [5, 257, 20000])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5, "repetition_penalty": 1.5}])
def test_forced_tokens_are_reported_and_change_nothing(
    device: Device, rng: np.random.Generator, settings: dict[str, Any], vocab: int
) -> None:
    """Several rows of one slot, of which one is sampled."""
    forced = [0, vocab - 1, -1, int(rng.integers(vocab))]
    asked = request(**{"num_logprobs": 2, "prompt_len": 4, **settings})
    problem = SampleProblem(
        coarse(rng, 4, vocab), [asked] * 4, [4, 5, 6, 7], counted(rng, 2, vocab), [0, 0, 0, 1], forced=forced
    )
    result = problem.run(device)
    assert [token for token, kept in zip(result.tokens, forced, strict=True) if kept >= 0] == [
        token for token in forced if token >= 0
    ]
    assert problem.counts is not None
    assert result.last_token.tolist() == [result.tokens[2], -7]
    assert (result.counts[1] == problem.counts[1]).all()
    assert (result.counts[0] != problem.counts[0]).sum() == (problem.counts[0, result.tokens[2]] & 0x7FFF != 0x7FFF)
    for sample, token in enumerate(result.tokens):
        expected = oracle_sample.log_softmax(problem.logits[sample])
        np.testing.assert_allclose(result.logprobs[sample], expected[token], atol=1e-5)
        assert result.top_ids[sample, :2].tolist() == oracle_sample.order(problem.logits[sample])[:2].tolist()
