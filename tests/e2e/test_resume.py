"""A request resumed from its tokens so far, at every token: the worker goes on exactly as it would have."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from deploy.local import LocalCluster
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc

TOKENS = 12
PROMPT = [504, 3575, 282, 4649, 314] * 4


async def run(address: str, *submits: engine_pb2.Submit) -> dict[int, tuple[list[int], list[float], engine_pb2.Finish]]:
    """Tokens, log-probabilities and finish by request id."""
    tokens: dict[int, list[int]] = {submit.request_id: [] for submit in submits}
    logprobs: dict[int, list[float]] = {submit.request_id: [] for submit in submits}
    finishes: dict[int, engine_pb2.Finish] = {}
    async with grpc.aio.insecure_channel(address) as channel:
        call = engine_pb2_grpc.EngineServiceStub(channel).Serve()
        await call.write(engine_pb2.ServeRequest(submits=submits, credit=10_000))
        while len(finishes) < len(submits):
            response = await call.read()
            assert isinstance(response, engine_pb2.ServeResponse)
            assert not response.rejections
            for output in response.outputs:
                tokens[output.request_id] += output.token_ids
                logprobs[output.request_id] += [entry.logprob for entry in output.logprobs]
            finishes.update({finish.request_id: finish for finish in response.finishes})
        call.cancel()
    return {number: (tokens[number], logprobs[number], finishes[number]) for number in finishes}


def submit(number: int, generated: list[int], **sampling: Any) -> engine_pb2.Submit:
    params = engine_pb2.SamplingParams(max_tokens=TOKENS, logprobs=0, **sampling)
    return engine_pb2.Submit(request_id=number, prompt_token_ids=PROMPT, generated_token_ids=generated, sampling=params)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0, "seed": 5, "ignore_eos": True},
        {"temperature": 0.8, "seed": 2**63, "repetition_penalty": 1.3, "presence_penalty": 0.5, "ignore_eos": True},
        {"temperature": 0.0, "frequency_penalty": 1.5, "ignore_eos": True},
        {"temperature": 1.0, "seed": 5, "constraint": engine_pb2.Constraint(regex="[a-z ,]{90,}")},
    ],
)
async def test_resumed_at_every_token(cluster: LocalCluster, sampling: dict[str, Any]) -> None:
    [(tokens, logprobs, finish)] = (await run(cluster.workers[0], submit(1, [], **sampling))).values()
    assert len(tokens) == TOKENS
    resumed = await run(cluster.workers[0], *(submit(cut, tokens[:cut], **sampling) for cut in range(1, TOKENS)))
    for cut, (rest, of_rest, end) in resumed.items():
        assert rest == tokens[cut:]
        assert of_rest == logprobs[cut:]
        assert (end.reason, end.usage.completion_tokens) == (finish.reason, TOKENS)


async def test_min_tokens_counts_what_was_generated_before(cluster: LocalCluster) -> None:
    """Every token that occurs is a stop id, so the request ends as soon as min_tokens allows."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    [(free, _, _)] = (await run(cluster.workers[0], submit(1, [], **greedy))).values()
    stopping = {**greedy, "min_tokens": 6, "stop_token_ids": sorted(set(free))[:8]}
    [(tokens, _, finish)] = (await run(cluster.workers[0], submit(1, [], **stopping))).values()
    resumed = await run(cluster.workers[0], *(submit(cut, tokens[:cut], **stopping) for cut in range(1, len(tokens))))
    for cut, (rest, _, end) in resumed.items():
        assert rest == tokens[cut:]
        assert (end.reason, end.stop_token_id) == (finish.reason, finish.stop_token_id)
