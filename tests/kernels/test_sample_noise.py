"""The generator against published vectors, and the distribution of draws against softmax."""

import math

import numpy as np
import pytest

from tests.kernels import oracle_sample
from tests.kernels.cases_sample import SampleProblem, flat, request
from tests.kernels.harness import Device

# Random123's kat_vectors, philox 4x32 10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize("counter,key,result", KNOWN)
def test_philox_known_answers(counter: str, key: str, result: str) -> None:
    low, high = words(key)
    assert oracle_sample.philox(np.array([words(counter)], np.uint32), (low, high))[0].tolist() == words(result)


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, 0x1_0000_0000, 0x299F31D0A4093822, 2**64 - 1])
def test_equal_logits_draw_the_largest_noise(device: Device, seed: int) -> None:
    vocab, positions = 1031, [1, 2, 77, 4096, 202751]
    requests = [request(seed=seed) for _ in positions]
    result = SampleProblem(np.zeros((len(positions), vocab), np.float32), requests, positions).run(device)
    for position, token in zip(positions, result.tokens, strict=True):
        noise = oracle_sample.gumbel(seed, position + 1, vocab)
        assert noise[token] >= noise.max() - 1e-4


def chi_square(observed: np.ndarray, p: np.ndarray) -> float:
    """Standardised: about normal(0, 1) if the draws follow p."""
    freedom = len(p) - 1
    statistic = float((np.square(observed - observed.sum() * p) / (observed.sum() * p)).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_follow_softmax(device: Device, rng: np.random.Generator, by: str, top_p: float) -> None:
    draws, vocab = 20000, 16
    logits = flat(rng, 1, vocab)
    rows = np.repeat(logits, draws, axis=0)
    one = request(seed=99, top_p=top_p, temperature=1.5)
    if by == "position":
        problem = SampleProblem(rows, [one] * draws, list(range(1, draws + 1)))
    else:
        requests = [request(seed=seed << 20, top_p=top_p, temperature=1.5) for seed in range(draws)]
        problem = SampleProblem(rows, requests, [5] * draws)
    tokens = problem.run(device).tokens
    values = (logits[0] / np.float32(1.5)).astype(np.float32)
    kept = oracle_sample.keep(values, one)
    p = np.where(kept, oracle_sample.probabilities(values), 0)
    observed = np.bincount(tokens, minlength=vocab)
    assert observed[~kept].sum() == 0
    assert abs(chi_square(observed[kept], p[kept] / p.sum())) < 5


def test_neighbouring_positions_are_independent(device: Device) -> None:
    draws, vocab = 20000, 4
    rows = np.zeros((draws, vocab), np.float32)
    tokens = SampleProblem(rows, [request(seed=5)] * draws, list(range(1, draws + 1))).run(device).tokens
    pairs = np.bincount(tokens[:-1] * vocab + tokens[1:], minlength=vocab * vocab)
    assert abs(chi_square(pairs, np.full(vocab * vocab, vocab**-2))) < 5
