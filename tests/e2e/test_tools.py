"""Tool calls and constraints on the embedded model, whose template shows no tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from glmserve.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
WEATHER = {
    **CLOSED,
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}


def request(**fields: Any) -> pb.ChatRequest:
    made = pb.ChatRequest(
        messages=[pb.ChatMessage(role=pb.ROLE_USER, content="How is the weather in Paris?")],
        tools=[
            pb.Tool(name="weather", description="Of a city.", parameters_json_schema=json.dumps(WEATHER)),
            pb.Tool(name="now", description="The time.", parameters_json_schema=json.dumps(CLOSED)),
        ],
        **fields,
    )
    made.sampling.max_tokens = 400
    return made


async def answer(client: Client, asked: pb.ChatRequest) -> tuple[str, list[tuple[str, Any]], pb.Finish]:
    content, finish = "", pb.Finish()
    calls: list[list[str]] = []
    async for message in client.Chat(asked):
        content += message.content
        for piece in message.tool_calls:
            if piece.id:
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments_json
        if message.HasField("finish"):
            finish = message.finish
    return content, [(name, json.loads(arguments)) for name, arguments in calls], finish


@pytest.mark.parametrize("seed", range(8))
async def test_a_call_of_a_named_tool_is_one_by_its_schema(client: Client, seed: int) -> None:
    asked = request(tool_choice=pb.ToolChoice(name="weather"), sampling=pb.SamplingOptions(seed=seed, temperature=1))
    content, [(name, arguments)], finish = await answer(client, asked)
    assert (content, name) == ("", "weather")
    jsonschema.validate(arguments, WEATHER)
    assert finish.reason == pb.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize("seed", range(4))
async def test_a_required_call_is_one_of_the_tools(client: Client, seed: int) -> None:
    choice = pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)
    sampling = pb.SamplingOptions(seed=seed, temperature=1)
    asked = request(tool_choice=choice, parallel_tool_calls=False, sampling=sampling)
    _, [(name, arguments)], finish = await answer(client, asked)
    assert name in ("weather", "now")
    jsonschema.validate(arguments, WEATHER if name == "weather" else {"type": "object"})
    assert finish.reason == pb.FINISH_REASON_TOOL_CALLS


@pytest.mark.parametrize("seed", range(4))
async def test_constrained_content_beside_tools(client: Client, seed: int) -> None:
    schema = {**CLOSED, "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    constraint = pb.OutputConstraint(json_schema=json.dumps(schema))
    asked = request(constraint=constraint, sampling=pb.SamplingOptions(temperature=1, seed=seed))
    for tool in asked.tools:
        tool.strict = True  # else arguments are any JSON, and may still be going on at max_tokens
    content, calls, _ = await answer(client, asked)
    schemas = {"weather": WEATHER, "now": CLOSED}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])
    if not calls:
        jsonschema.validate(json.loads(content), schema)
