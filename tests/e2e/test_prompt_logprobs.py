"""Log-probabilities of a prompt on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from glmserve.inference.v1 import inference_pb2 as pb
from tests.e2e.client import generate, request

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client


async def prompt_logprobs(client: Client, prompt: list[int], count: int) -> list[pb.TokenLogprob]:
    asked = request(prompt, max_tokens=1, prompt_logprobs=count)
    return [entry async for message in client.Generate(asked) for entry in message.prompt_logprobs]


async def test_a_text_scores_as_it_did_when_it_was_generated(client: Client) -> None:
    tokens = await client.Tokenize(pb.TokenizeRequest(text="Once upon a time, in a small village by the sea, there"))
    prompt = list(tokens.ids)
    answer = await generate(client, prompt, max_tokens=40, logprobs=2)
    scores = await prompt_logprobs(client, [*prompt, *answer.token_ids], 2)
    assert [entry.token_id for entry in scores] == [*prompt, *answer.token_ids]
    assert (scores[0].logprob, len(scores[0].top)) == (0, 0)
    for scored, sampled in zip(scores[len(prompt) :], answer.logprobs, strict=True):
        assert scored.logprob == pytest.approx(sampled.logprob, abs=0.02)
        assert [top.token_id for top in scored.top][:1] == [sampled.token_id], "greedy"
    assert all(entry.logprob <= entry.top[0].logprob for entry in scores[1:])


async def test_it_changes_nothing_else(client: Client) -> None:
    plain = await generate(client, "The capital of France is", max_tokens=12)
    scored = await generate(client, "The capital of France is", max_tokens=12, prompt_logprobs=5)
    assert (scored.text, scored.finish.usage.cached_prompt_tokens) == (plain.text, 0)
