"""Every refusal names the field, the value and what is allowed, and disturbs nothing else."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from glmserve.inference.v1 import inference_pb2
from tests.unit.router_harness import MAX_CONTEXT, VOCAB_SIZE, Bench, bench, encode, step, text_model

SERVICE = "/glmserve.inference.v1.InferenceService"
LAST_ID = VOCAB_SIZE - 1
ROOM = MAX_CONTEXT - len(encode("hi"))

# Field of SamplingOptions, value, field named in the error, parts of its description.
SAMPLING: list[tuple[str, Any, str, tuple[str, ...]]] = [
    ("max_tokens", 0, "sampling.max_tokens", ("0", "1 to")),
    ("max_tokens", ROOM + 1, "sampling.max_tokens", (str(ROOM + 1), f"1 to {ROOM}", str(MAX_CONTEXT))),
    ("max_tokens", 2**32 - 1, "sampling.max_tokens", (str(2**32 - 1), f"1 to {ROOM}")),
    ("temperature", -0.5, "sampling.temperature", ("-0.5", "0 to 2")),
    ("temperature", 2.5, "sampling.temperature", ("2.5", "0 to 2")),
    ("temperature", math.nan, "sampling.temperature", ("nan", "0 to 2")),
    ("temperature", math.inf, "sampling.temperature", ("inf", "0 to 2")),
    ("top_p", 0.0, "sampling.top_p", ("0", "above 0, at most 1")),
    ("top_p", 1.5, "sampling.top_p", ("1.5", "above 0, at most 1")),
    ("top_p", math.nan, "sampling.top_p", ("nan", "above 0, at most 1")),
    ("min_p", -0.25, "sampling.min_p", ("-0.25", "0 to 1")),
    ("min_p", 1.25, "sampling.min_p", ("1.25", "0 to 1")),
    ("repetition_penalty", 0.0, "sampling.repetition_penalty", ("0", "above 0, at most 10")),
    ("repetition_penalty", 11.0, "sampling.repetition_penalty", ("11", "above 0, at most 10")),
    ("repetition_penalty", -math.inf, "sampling.repetition_penalty", ("-inf", "above 0, at most 10")),
    ("frequency_penalty", 2.25, "sampling.frequency_penalty", ("2.25", "-2 to 2")),
    ("presence_penalty", -2.25, "sampling.presence_penalty", ("-2.25", "-2 to 2")),
    ("presence_penalty", math.nan, "sampling.presence_penalty", ("nan", "-2 to 2")),
    ("logprobs", 21, "sampling.logprobs", ("21", "0 to 20")),
    ("min_tokens", ROOM + 1, "sampling.min_tokens", (str(ROOM + 1), f"0 to max_tokens = {ROOM}")),
    ("stop", ["x"] * 17, "sampling.stop", ("17", "0 to 16")),
    ("stop", ["x", ""], "sampling.stop[1]", ("0 bytes", "1 to 256")),
    ("stop", ["é" * 129], "sampling.stop[0]", ("258 bytes", "1 to 256")),
    ("stop_token_ids", [1] * 33, "sampling.stop_token_ids", ("33", "0 to 32")),
    ("stop_token_ids", [1, VOCAB_SIZE], "sampling.stop_token_ids[1]", (str(VOCAB_SIZE), f"0 to {LAST_ID}")),
    ("logit_bias", dict.fromkeys(range(301), 1.0), "sampling.logit_bias", ("301", "0 to 300")),
    ("logit_bias", {VOCAB_SIZE: 1.0}, "sampling.logit_bias", (str(VOCAB_SIZE), f"0 to {LAST_ID}")),
    ("logit_bias", {3: 101.0}, "sampling.logit_bias[3]", ("101", "-100 to 100")),
    ("logit_bias", {3: math.nan}, "sampling.logit_bias[3]", ("nan", "-100 to 100")),
]
# The extremes that are allowed.
ALLOWED: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": ROOM, "min_tokens": ROOM},
    {"temperature": 0.0, "top_p": 1.0, "top_k": 2**32 - 1, "min_p": 0.0, "repetition_penalty": 10.0},
    {"temperature": 2.0, "top_p": 1e-6, "top_k": 0, "min_p": 1.0, "repetition_penalty": 1e-6},
    {"frequency_penalty": -2.0, "presence_penalty": 2.0, "logprobs": 0, "seed": 2**64 - 1},
    {"stop": ["é" * 128] * 16, "stop_token_ids": [LAST_ID] * 32, "logprobs": 20, "seed": 0},
    {"logit_bias": {token_id: -100.0 if token_id % 2 else 100.0 for token_id in range(300)}},
]


def says(content: str) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=content)


user = says("hi")
REQUESTS: list[tuple[Message, str, tuple[str, ...]]] = [
    (inference_pb2.GenerateRequest(), "prompt", ("missing", "prompt_ids")),
    (inference_pb2.GenerateRequest(prompt=""), "prompt", ("empty", "at least one")),
    (inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds()), "prompt_ids.ids", ("empty",)),
    (
        inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=[0, VOCAB_SIZE])),
        "prompt_ids.ids[1]",
        (str(VOCAB_SIZE), f"0 to {LAST_ID}"),
    ),
    (
        inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=[1] * MAX_CONTEXT)),
        "prompt_ids.ids",
        (str(MAX_CONTEXT), f"1 to {MAX_CONTEXT - 1}"),
    ),
    (inference_pb2.GenerateRequest(prompt="0 " * 4000), "prompt", (f"1 to {MAX_CONTEXT - 1}",)),
    (inference_pb2.GenerateRequest(prompt="hi", priority=101), "priority", ("101", "-100 to 100")),
    (inference_pb2.GenerateRequest(prompt="hi", priority=-(2**31)), "priority", (str(-(2**31)), "-100 to 100")),
    (inference_pb2.ChatRequest(), "messages", ("empty",)),
    (inference_pb2.ChatRequest(messages=[user], priority=-101), "priority", ("-101",)),
    (inference_pb2.ChatRequest(messages=[user, inference_pb2.ChatMessage(content="x")]), "messages[1].role", ("0",)),
    (inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role=9)]), "messages[0].role", ("9", "ROLE_USER")),  # type: ignore[arg-type]
    (
        inference_pb2.ChatRequest(messages=[says("hi" * 99)]),
        "messages",
        (f"1 to {MAX_CONTEXT - 1}",),
    ),
    (
        inference_pb2.ChatRequest(messages=[says("refuse me")]),
        "messages",
        ("not this one",),
    ),
    (inference_pb2.DetokenizeRequest(ids=[5, 2**32 - 1]), "ids[1]", (str(2**32 - 1), f"0 to {LAST_ID}")),
]


async def send(b: Bench, method: str, data: bytes) -> bytes:
    """Raw bytes in, the first response's bytes out."""
    stream: Any = b.channel.unary_stream if method in ("Generate", "Chat") else b.channel.unary_unary
    call = stream(f"{SERVICE}/{method}")(data)
    response: bytes = await (call.read() if method in ("Generate", "Chat") else call)
    return response


async def refusal(b: Bench, method: str, data: bytes) -> tuple[str, str]:
    """Field and description of an INVALID_ARGUMENT."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await send(b, method, data)
    error = caught.value
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    [violation] = bad.field_violations
    assert status.message == f"{violation.field}: {violation.description}"
    return violation.field, violation.description


def method_of(request: Message) -> str:
    return request.DESCRIPTOR.name.removesuffix("Request")


async def test_every_bad_sampling_value_is_refused_by_name_in_generate_and_chat() -> None:
    async with bench() as b:
        for name, value, field, parts in SAMPLING:
            options = inference_pb2.SamplingOptions(**{name: value})
            generate = inference_pb2.GenerateRequest(prompt="hi", sampling=options)
            got_field, description = await refusal(b, "Generate", generate.SerializeToString())
            assert got_field == field
            assert all(part in description for part in parts), (name, value, description)
            chat = inference_pb2.ChatRequest(messages=[user], sampling=options)
            if name not in ("max_tokens", "min_tokens"):  # their range depends on the prompt
                assert await refusal(b, "Chat", chat.SerializeToString()) == (field, description)
        assert b.worker.submits.empty()


async def test_every_bad_request_is_refused_by_name() -> None:
    async with bench() as b:
        for request, field, parts in REQUESTS:
            got_field, description = await refusal(b, method_of(request), request.SerializeToString())
            assert got_field == field, (request, description)
            assert all(part in description for part in parts), (request, description)
        assert b.worker.submits.empty()


@pytest.mark.parametrize("sampling", ALLOWED)
async def test_extremes_are_accepted(sampling: dict[str, Any]) -> None:
    async with bench() as b:
        b.worker.answer = lambda submit: [step(submit.request_id, encode("ok"), "LENGTH")]
        options = inference_pb2.SamplingOptions(**sampling)
        request = inference_pb2.GenerateRequest(prompt="hi", sampling=options, priority=100)
        data = await send(b, "Generate", request.SerializeToString())
        assert inference_pb2.GenerateResponse.FromString(data).text == "ok"
        submit = await b.worker.submits.get()
        biases = {entry.token_id: entry.bias for entry in submit.sampling.logit_bias}
        assert biases == sampling.get("logit_bias", {})


async def test_text_that_is_not_utf8_is_refused_by_the_field_it_is_in() -> None:
    good = inference_pb2.ChatRequest(messages=[user]).SerializeToString()
    bad_message = b"\x12\x06\x08\x02\x12\x02a\xff"
    cases = [
        ("Generate", b"\x12\x03ab\xff", "prompt"),
        ("Generate", b"\x0a\x02\xc3\x28", "model"),
        ("Generate", b"\x12\x02hi\x22\x08\x5a\x02ok\x5a\x02\xf0\x9f", "sampling.stop[1]"),
        ("Chat", good + bad_message, "messages[1].content"),
        ("Tokenize", b"\x0a\x01\x80", "text"),
        ("GetModel", b"\x0a\x01\x80", "model"),
    ]
    async with bench() as b:
        for method, data, field in cases:
            got_field, description = await refusal(b, method, data)
            assert (got_field, "UTF-8" in description) == (field, True), (method, description)


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x12\x7fshort", b"\x0b", b"\x12\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01"]
)
async def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    async with bench() as b:
        for method in ("Generate", "Chat", "Tokenize", "Detokenize", "GetModel"):
            field, description = await refusal(b, method, data)
            assert field == "request"
            assert f"glmserve.inference.v1.{method}Request" in description


async def test_another_models_name_is_not_found_however_long() -> None:
    async with bench() as b:
        for name in ("other", "x" * 100_000):
            for request in (
                inference_pb2.GenerateRequest(model=name, prompt="hi"),
                inference_pb2.ChatRequest(model=name, messages=[user]),
                inference_pb2.GetModelRequest(model=name),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await send(b, method_of(request), request.SerializeToString())
                assert caught.value.code() == grpc.StatusCode.NOT_FOUND
                assert "tiny" in str(caught.value.details())


async def test_chat_without_a_template_is_unimplemented() -> None:
    async with bench(dataclasses.replace(text_model(), template=None)) as b:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await send(b, "Chat", inference_pb2.ChatRequest(messages=[user]).SerializeToString())
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "no chat template" in str(caught.value.details())
