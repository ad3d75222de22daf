from typing import Any

import numpy as np
import pytest

from tests.kernels import oracle_sample
from tests.kernels.cases_sample import (
    SETTINGS,
    VOCABS,
    Logits,
    SampleProblem,
    coarse,
    counted,
    flat,
    peaked,
    request,
)
from tests.kernels.harness import Device

# l + g is computed in f32: a lead smaller than this may go either way.
MARGIN = 1e-4


def expected(problem: SampleProblem, sample: int) -> oracle_sample.Drawn:
    assert problem.counts is not None
    slot = problem.slots[sample]
    position = problem.positions[sample] + 1
    return oracle_sample.sample(
        problem.logits[sample], problem.requests[sample], problem.counts[slot], position, problem.allowed[sample]
    )


def check(device: Device, problem: SampleProblem) -> None:
    result = problem.run(device)
    for sample, token in enumerate(result.tokens):
        drawn = expected(problem, sample)
        margin = MARGIN * max(1.0, 1e-3 / (problem.requests[sample].temperature or 1.0))
        assert token == drawn.token or (drawn.margin < margin and drawn.kept[token])


def make(
    rng: np.random.Generator, logits: Logits, vocab: int, settings: dict[str, Any], samples: int = 5
) -> SampleProblem:
    seeds = rng.integers(0, 2**63, samples)
    requests = [request(**{"seed": int(seed), "prompt_len": 4, **settings}) for seed in seeds]
    slots = rng.permutation(samples + 2)[:samples].tolist()
    positions = rng.integers(4, 3000, samples).tolist()
    return SampleProblem(logits(rng, samples, vocab), requests, positions, counted(rng, samples + 2, vocab), slots)


@pytest.mark.parametrize("logits", [flat, peaked, coarse])
@pytest.mark.parametrize("vocab", [1, 7, 257, 8195])
@pytest.mark.parametrize("name", SETTINGS)
def test_draws_the_oracles_token(
    device: Device, rng: np.random.Generator, name: str, vocab: int, logits: Logits
) -> None:
    check(device, make(rng, logits, vocab, SETTINGS[name]))


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_vocabulary_size(device: Device, rng: np.random.Generator, vocab: int) -> None:
    for settings in ({}, {"top_p": 0.9}, {"top_k": 50, "temperature": 0.8}, {"temperature": 0.0}):
        check(device, make(rng, peaked, vocab, settings, samples=2))


@pytest.mark.parametrize("samples", [0, 1, 2, 33])
def test_any_number_of_samples(device: Device, rng: np.random.Generator, samples: int) -> None:
    check(device, make(rng, flat, 300, {"top_p": 0.7}, samples))


def test_a_sample_is_the_same_alone_and_in_a_crowd(
    device: Device, other_device: Device, rng: np.random.Generator
) -> None:
    settings = list(SETTINGS.values())
    requests = [request(**{"seed": 7 + i, "num_logprobs": 3, **s}) for i, s in enumerate(settings)]
    count = len(requests)
    logits = peaked(rng, count, 20000)
    problem = SampleProblem(logits, requests, list(range(10, 10 + count)), counted(rng, count, 20000))
    crowd, elsewhere = problem.run(device), problem.run(other_device)
    for sample in range(count):
        alone = problem.only(sample).run(device)
        for result, index in ((crowd, sample), (elsewhere, sample)):
            assert alone.tokens[0] == result.tokens[index]
            assert alone.logprobs[0].tobytes() == result.logprobs[index].tobytes()
            assert alone.top_ids[0].tobytes() == result.top_ids[index].tobytes()
            assert alone.top_logprobs[0].tobytes() == result.top_logprobs[index].tobytes()


def test_state_follows_the_sampled_token(device: Device, rng: np.random.Generator) -> None:
    problem = make(rng, flat, 50, {})
    assert problem.counts is not None
    problem.counts[problem.slots[0]] = 0x7FFF
    problem.counts[problem.slots[1]] = 0xFFFF
    problem.counts[problem.slots[2]] = 0x8000
    result = problem.run(device)
    wanted = problem.counts.copy()
    for slot, token in zip(problem.slots, result.tokens, strict=True):
        assert result.last_token[slot] == token
        wanted[slot, token] += (wanted[slot, token] & 0x7FFF) != 0x7FFF
    assert (result.counts == wanted).all()
    others = sorted(set(range(len(problem.counts))) - set(problem.slots))
    assert (result.last_token[others] == -7).all()


@pytest.mark.parametrize(("first", "end"), [(0, 4), (4, 700), (256, 512), (300, 301), (8000, 20000)])
def test_some_columns_are_the_vocabulary_without_the_others(
    device: Device, rng: np.random.Generator, first: int, end: int
) -> None:
    settings = list(SETTINGS.values())
    requests = [request(**{"seed": 7 + i, "num_logprobs": 3, "prompt_len": 4, **s}) for i, s in enumerate(settings)]
    requests[0] = request(temperature=0.0, bias=[(first, 50.0), (20000 - 1, 90.0)], num_logprobs=1, prompt_len=4)
    logits = peaked(rng, len(requests), 20000)
    logits[:, :first] = logits[:, end:] = -np.inf
    positions = list(range(10, 10 + len(requests)))
    problem = SampleProblem(logits, requests, positions, counted(rng, len(requests), 20000))
    check(device, problem)
    whole, some = problem.run(device), problem.columns(first, end).run(device)
    assert some.tokens.tolist() == whole.tokens.tolist()
    assert (some.last_token == whole.last_token).all() and (some.counts == whole.counts).all()
    wanted = min(3, end - first)
    np.testing.assert_allclose(some.logprobs, whole.logprobs, atol=1e-5)
    assert some.top_ids[1:, :wanted].tolist() == whole.top_ids[1:, :wanted].tolist()
