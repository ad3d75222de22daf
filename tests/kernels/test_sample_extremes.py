from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.cases_sample import SETTINGS, SampleProblem, flat, peaked, request
from tests.kernels.harness import Device, poison


def run_one(device: Device, logits: list[float], **settings: Any) -> int:
    problem = SampleProblem(np.array([logits], np.float32), [request(**settings)], [3])
    return int(problem.run(device).tokens[0])


@pytest.mark.parametrize("fill", [-np.inf, np.nan])
@pytest.mark.parametrize("name", SETTINGS)
def test_without_a_possible_token_nothing_changes(device: Device, name: str, fill: float) -> None:
    logits = np.zeros((3, 300), np.float32)
    logits[1] = fill
    problem = SampleProblem(logits, [request(**{"num_logprobs": 2, **SETTINGS[name]})] * 3, [8, 8, 8])
    assert problem.counts is not None
    before = problem.counts.copy()
    result = problem.run(device)
    assert result.tokens[1] == -1
    assert result.last_token[1] == -7
    assert (result.counts[1] == before[1]).all()
    assert (result.tokens[[0, 2]] >= 0).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_only_possible_token_is_drawn(device: Device, name: str) -> None:
    for only in (0, 255, 256, 599):
        logits = np.full((1, 600), -np.inf, np.float32)
        logits[0, 1::2] = np.nan
        logits[0, only] = -1e30
        problem = SampleProblem(logits, [request(**SETTINGS[name])], [1])
        assert problem.run(device).tokens[0] == only


def test_one_token_of_minus_infinity_is_never_drawn(device: Device) -> None:
    logits = np.zeros((500, 3), np.float32)
    logits[:, 1] = -np.inf
    tokens = SampleProblem(logits, [request()] * 500, list(range(1, 501))).run(device).tokens
    assert set(tokens.tolist()) == {0, 2}


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-30}, {"temperature": 0.0}])
def test_ties_go_to_the_lower_id(device: Device, settings: dict[str, float]) -> None:
    logits = np.zeros(20000)
    logits[[300, 301, 9000, 19999]] = 5
    assert run_one(device, logits.tolist(), **settings) == 300
    assert run_one(device, [1.0] * 700, **settings) == 0
    assert run_one(device, [-0.0, 0.0], **settings) == 0


def test_min_p_of_one_keeps_exact_ties_only(device: Device) -> None:
    logits = np.zeros((300, 9), np.float32)
    logits[:, [2, 6]] = 3
    logits[:, 4] = np.nextafter(np.float32(3), np.float32(0))
    tokens = SampleProblem(logits, [request(min_p=1.0)] * 300, list(range(1, 301))).run(device).tokens
    assert set(tokens.tolist()) == {2, 6}


def test_top_p_keeps_the_token_that_crosses(device: Device) -> None:
    logits = np.tile(np.log(np.array([0.25, 0.4, 0.3, 0.05], np.float32)), (400, 1))
    for top_p, kept in [(0.39, {1}), (0.41, {1, 2}), (0.69, {1, 2}), (0.71, {0, 1, 2}), (0.96, {0, 1, 2, 3})]:
        tokens = SampleProblem(logits, [request(top_p=top_p)] * 400, list(range(1, 401))).run(device).tokens
        assert set(tokens.tolist()) == kept


def test_huge_bias_wins_and_huge_negative_bias_loses(device: Device, rng: np.random.Generator) -> None:
    logits = peaked(rng, 1, 9000)[0].tolist()
    assert run_one(device, logits, bias=[(8999, 1e30)]) == 8999
    best = int(np.argmax(logits))
    assert run_one(device, logits, bias=[(best, -1e30)], temperature=0.0) != best


def test_every_bias_and_every_stop_id_counts(device: Device) -> None:
    bias = [(i, float(i)) for i in range(abi.MAX_LOGIT_BIAS)]
    assert run_one(device, [0.0] * 8500, bias=bias, temperature=0.0) == abi.MAX_LOGIT_BIAS - 1
    stops = list(range(abi.MAX_STOP_IDS))
    logits = [10.0] * abi.MAX_STOP_IDS + [0.0] * 3
    token = run_one(device, logits, stop_ids=stops, min_tokens=100, temperature=0.0)
    assert token == abi.MAX_STOP_IDS


@pytest.mark.parametrize("position,token", [(3, 1), (4, 1), (5, 0), (6, 0)])
def test_stop_ids_are_masked_for_min_tokens(device: Device, position: int, token: int) -> None:
    logits = np.array([[5, 1, 0]], np.float32)
    one = request(temperature=0.0, stop_ids=[0], min_tokens=2, prompt_len=4)
    assert SampleProblem(logits, [one], [position]).run(device).tokens[0] == token


def test_masking_every_token_reports_none(device: Device) -> None:
    assert run_one(device, [1.0], stop_ids=[0], min_tokens=1, prompt_len=4) == -1


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e6, 3e38])
def test_temperatures_at_both_ends(device: Device, rng: np.random.Generator, temperature: float) -> None:
    logits = flat(rng, 64, 5000)
    requests = [request(temperature=temperature, top_p=0.9)] * 64
    tokens = SampleProblem(logits, requests, list(range(1, 65))).run(device).tokens
    assert (tokens >= 0).all()
    if temperature < 1e-5:
        assert (logits[np.arange(64), tokens] > np.sort(logits, axis=1)[:, -20]).all()
    else:
        assert len(set(tokens.tolist())) > 32


def test_saturated_counts_penalise_without_wrapping(device: Device) -> None:
    counts = np.array([[0xFFFF, 0x7FFF, 0, 0x8000]], np.uint16)
    problem = SampleProblem(
        np.array([[9, 9, 1, 0]], np.float32), [request(temperature=0.0, frequency_penalty=2.0)], [5], counts
    )
    result = problem.run(device)
    assert result.tokens[0] == 2
    assert (result.counts == [[0xFFFF, 0x7FFF, 1, 0x8000]]).all()


def test_prompt_tokens_meet_the_repetition_penalty_only(device: Device) -> None:
    counts = np.array([[0x8000, 0, 0]], np.uint16)
    logits = np.array([[3, 2, 0]], np.float32)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"repetition_penalty": 2.0}, 1),
        ({"frequency_penalty": 2.0}, 0),
        ({"presence_penalty": 2.0}, 0),
    ]
    for settings, token in cases:
        problem = SampleProblem(logits, [request(temperature=0.0, **settings)], [5], counts)
        assert problem.run(device).tokens[0] == token


def test_nothing_but_the_token_is_written_without_logprobs(device: Device, rng: np.random.Generator) -> None:
    result = SampleProblem(flat(rng, 2, 40), [request(), request(temperature=0.0)], [1, 1]).run(device)
    for array in (result.logprobs, result.top_ids, result.top_logprobs):
        assert array.tobytes() == poison(array.shape, array.dtype).tobytes()
