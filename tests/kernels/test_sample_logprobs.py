from typing import Any

import numpy as np
import pytest

from tests.kernels import abi, oracle_sample
from tests.kernels.cases_sample import Logits, SampleProblem, coarse, counted, flat, peaked, request
from tests.kernels.harness import Device, poison


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, abi.MAX_LOGPROBS])
@pytest.mark.parametrize("vocab", [20, 257, 20000])
@pytest.mark.parametrize("logits", [flat, peaked, coarse])
def test_logprobs_are_the_models_own(
    device: Device, rng: np.random.Generator, logits: Logits, vocab: int, num_logprobs: int
) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.3, "top_p": 0.5},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "bias": [(3, 50.0)]},
    ]
    requests = [request(num_logprobs=num_logprobs, **s) for s in settings]
    problem = SampleProblem(logits(rng, 3, vocab), requests, [4, 5, 6], counted(rng, 3, vocab))
    result = problem.run(device)
    for sample, token in enumerate(result.tokens):
        expected = oracle_sample.log_softmax(problem.logits[sample])
        np.testing.assert_allclose(result.logprobs[sample], expected[token], atol=1e-5)
        best = oracle_sample.order(problem.logits[sample])[:num_logprobs]
        assert result.top_ids[sample, :num_logprobs].tolist() == best.tolist()
        np.testing.assert_allclose(result.top_logprobs[sample, :num_logprobs], expected[best], atol=1e-5)
        unused = result.top_ids[sample, num_logprobs:]
        assert unused.tobytes() == poison(unused.shape, unused.dtype).tobytes()


def test_more_alternatives_than_tokens(device: Device) -> None:
    logits = np.array([[0, np.nan, 2, -np.inf]], np.float32)
    result = SampleProblem(logits, [request(temperature=0.0, num_logprobs=6)], [1]).run(device)
    assert result.top_ids[0, :6].tolist() == [2, 0, 1, 3, -1, -1]
    assert np.isneginf(result.top_logprobs[0, 2:6]).all()


def test_certainty_has_logprob_zero(device: Device) -> None:
    logits = np.array([[0, 200, 0]], np.float32)
    result = SampleProblem(logits, [request(num_logprobs=2)], [1]).run(device)
    assert result.tokens[0] == 1
    assert result.logprobs[0] == 0
    assert result.top_ids[0, :2].tolist() == [1, 0]
    np.testing.assert_allclose(result.top_logprobs[0, :2], [0, -200])
