"""/v1/completions and /v1/models through the official client."""

from __future__ import annotations

import openai
import pytest

from glmserve.engine.v1 import engine_pb2
from router.http.completions import completion_requests
from router.http.schema_openai import CompletionRequest
from tests.unit.http_harness import front
from tests.unit.router_harness import byte_ids, encode
from tests.unit.telemetry_harness import attributes, recorded

PARIS = " of France is Paris"


async def test_a_completion_is_the_same_whole_and_streamed() -> None:
    async with front() as f:
        usage = engine_pb2.Usage(cached_prompt_tokens=1)
        f.answer(*([token_id] for token_id in encode(PARIS)), usage=usage)
        whole = await f.openai.completions.create(model="tiny", prompt="The capital", max_tokens=40)
        assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("text_completion", "tiny", "length")
        assert whole.choices[0].text == PARIS
        stream = await f.openai.completions.create(
            model="tiny", prompt="The capital", max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == PARIS
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
        assert not last.choices
        assert last.usage == whole.usage
        assert last.usage is not None and last.usage.prompt_tokens_details is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(encode("The capital")), 4)
        assert last.usage.prompt_tokens_details.cached_tokens == 1


async def test_several_prompts_are_several_choices_in_their_order() -> None:
    async with front() as f:
        f.answer(encode(PARIS))
        given: list[list[int]] = [encode("The"), encode("capital"), encode("fox")]
        whole = await f.openai.completions.create(model="tiny", prompt=given)
        assert [(choice.index, choice.text) for choice in whole.choices] == [(index, PARIS) for index in range(3)]
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == sum(map(len, given))
        stream = await f.openai.completions.create(model="tiny", prompt=["The", "fox"], stream=True)
        texts = {0: "", 1: ""}
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {0: PARIS, 1: PARIS}


async def test_one_prompt_of_several_that_is_wrong_ends_all_and_leaves_nothing_behind() -> None:
    async with front() as f:
        with pytest.raises(openai.BadRequestError) as caught:
            await f.openai.completions.create(model="tiny", prompt=["The", ""])
        assert caught.value.param == "prompt"
        submit = await f.worker.submits.get()
        assert await f.worker.aborts.get() == submit.request_id


async def test_logprobs_are_four_lists_over_the_text() -> None:
    async with front() as f:
        ids = [*encode(" Paris"), *byte_ids("é".encode())]
        logprobs = [
            engine_pb2.TokenLogprobs(logprob=-0.5, top_token_ids=[token_id, 5], top_logprobs=[-0.5, -2.0])
            for token_id in ids
        ]

        def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
            response = engine_pb2.ServeResponse()
            response.outputs.add(request_id=submit.request_id, token_ids=ids, logprobs=logprobs)
            response.finishes.add(request_id=submit.request_id, reason="FINISH_REASON_LENGTH")
            return [response]

        f.worker.answer = answer
        whole = await f.openai.completions.create(model="tiny", prompt="The", logprobs=2)
        found = whole.choices[0].logprobs
        assert found is not None and found.tokens is not None and found.text_offset is not None
        assert found.tokens[-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert found.token_logprobs == [-0.5] * len(ids)
        assert found.text_offset[0] == 0
        assert found.top_logprobs is not None
        assert found.top_logprobs[0][found.tokens[0]] == -0.5


def test_every_field_reaches_the_request() -> None:
    body = CompletionRequest.model_validate_json(
        """{"model": "tiny", "prompt": [1, 2], "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1,
        "repetition_penalty": 1.5, "frequency_penalty": -1, "presence_penalty": 1, "seed": -1, "stop": "x",
        "stop_token_ids": [3], "ignore_eos": true, "min_tokens": 2, "max_tokens": 9, "logit_bias": {"5": -3.5}, "n": 2,
        "best_of": 3, "echo": true, "logprobs": 4, "suffix": "end", "priority": 7, "guided_regex": "a+"}"""
    )
    [request], names = completion_requests(body)
    sampling = request.sampling
    assert list(request.prompt_ids.ids) == [1, 2]
    assert (request.model, request.echo, request.suffix, request.priority) == ("tiny", True, "end", 7)
    assert request.constraint.regex == "a+"
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 0.5, 0)
    assert (sampling.seed, list(sampling.stop), list(sampling.stop_token_ids)) == (2**64 - 1, ["x"], [3])
    assert (sampling.min_tokens, sampling.max_tokens, sampling.n, sampling.best_of) == (2, 9, 2, 3)
    assert (sampling.logprobs, sampling.prompt_logprobs, dict(sampling.logit_bias)) == (4, 4, {5: -3.5})
    assert sampling.HasField("top_k") and sampling.HasField("temperature")
    assert names.of("constraint.regex") == "guided_regex"
    assert names.of("sampling.top_p") == "top_p"


def test_what_is_unset_stays_unset_but_max_tokens() -> None:
    [request], _ = completion_requests(CompletionRequest(prompt="a"))
    assert [field.name for field, _ in request.sampling.ListFields()] == ["max_tokens"]
    assert request.sampling.max_tokens == 16


async def test_models_are_those_that_are_served() -> None:
    async with front() as f:
        assert [model.id async for model in f.openai.models.list()] == ["tiny"]
        assert [model.id async for model in f.anthropic.models.list()] == ["tiny"]
        assert (await f.openai.models.retrieve("tiny")).owned_by == "glmserve"
        with pytest.raises(openai.NotFoundError) as caught:
            await f.openai.models.retrieve("org/other")
        assert caught.value.code == "model_not_found"


async def test_a_completion_is_a_span_of_http() -> None:
    with recorded() as seen:
        async with front(telemetry=seen.telemetry) as f:
            f.answer(encode(PARIS))
            await f.openai.completions.create(model="tiny", prompt="The capital", max_tokens=4)
        found = attributes(seen.spans["http text_completion"])
    assert found["network.protocol.name"] == "http"
    assert not [name for name in found if name.startswith("rpc.")]
