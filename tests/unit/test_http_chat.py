"""/v1/chat/completions through the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.http.chat_request import chat_request
from router.http.schema_openai import ChatCompletionRequest
from tests.unit.http_harness import front
from tests.unit.router_harness import EOS, encode

PARIS = " of France is Paris"


def translated(**body: Any) -> inference_pb2.ChatRequest:
    body.setdefault("messages", [{"role": "user", "content": "Hi"}])
    return chat_request(ChatCompletionRequest.model_validate_json(json.dumps(body)))[0]


async def test_a_chat_is_the_same_whole_and_streamed() -> None:
    async with front() as f:
        f.answer(*([token_id] for token_id in [*encode(PARIS), EOS]), reason="STOP", stop_token_id=EOS)
        request: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
        whole = await f.openai.chat.completions.create(**request)
        choice = whole.choices[0]
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", PARIS, "stop")
        stream = await f.openai.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
        first, *chunks, end, usage = [chunk async for chunk in stream]
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
        assert end.choices[0].finish_reason == "stop"
        assert usage.usage == whole.usage


async def test_the_official_accumulator_builds_the_same_answer() -> None:
    async with front() as f:
        f.answer(*([token_id] for token_id in [*encode(PARIS), EOS]), reason="STOP", stop_token_id=EOS)
        async with f.openai.chat.completions.stream(
            model="tiny", messages=[{"role": "user", "content": "Hi"}]
        ) as stream:
            completion = await stream.get_final_completion()
        assert completion.choices[0].message.content == PARIS


def test_messages_keep_their_roles_and_parts() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request = translated(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
    )
    system, user, assistant, tool = request.messages
    assert (system.role, system.content) == (inference_pb2.ROLE_SYSTEM, "Be brief.")
    assert (user.role, user.content) == (inference_pb2.ROLE_USER, "ab")
    assert (assistant.content, assistant.reasoning) == ("", "hm")
    assert (assistant.tool_calls[0].id, assistant.tool_calls[0].arguments_json) == ("c1", '{"a": 1}')
    assert (tool.role, tool.content, tool.tool_call_id) == (inference_pb2.ROLE_TOOL, "42", "c1")


def test_tools_and_their_choice() -> None:
    schema = {"type": "object", "properties": {"città": {"type": "string"}}}
    function = {"name": "f", "description": "does", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    request = translated(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(request.tools[0].parameters_json_schema) == schema
    assert "città" in request.tools[0].parameters_json_schema
    assert (request.tools[0].name, request.tools[0].description, request.tools[0].strict) == ("f", "does", True)
    assert request.tool_choice.mode == inference_pb2.TOOL_MODE_REQUIRED
    assert request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    named = translated(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})
    assert named.tool_choice.name == "f"
    assert not translated(tools=tools).HasField("tool_choice")


@pytest.mark.parametrize(
    ("given", "enabled", "cleared"),
    [
        ({}, None, None),
        ({"chat_template_kwargs": {"enable_thinking": False, "clear_thinking": False}}, False, False),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "disabled", "clear_thinking": True}}, False, True),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "high"}, None, None),
    ],
)
def test_every_way_to_say_thinking(given: dict[str, Any], enabled: bool | None, cleared: bool | None) -> None:
    request = translated(**given)
    assert (request.enable_thinking if request.HasField("enable_thinking") else None) is enabled
    assert (request.clear_thinking if request.HasField("clear_thinking") else None) is cleared


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
            "json_schema",
            '{"type": "array"}',
        ),
        ({"guided_json": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "a|b"}, "regex", "a|b"),
        ({"guided_grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "a"),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
    ],
)
def test_every_way_to_ask_for_structure(given: dict[str, Any], kind: str, value: str) -> None:
    constraint = translated(**given).constraint
    assert constraint.WhichOneof("kind") == kind
    assert getattr(constraint, kind) == value


def test_choices_are_texts() -> None:
    for given in ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}):
        assert list(translated(**given).constraint.choices.texts) == ["a", "b"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages[0].reasoning_content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        translated(**given)
    assert caught.value.field == field


def test_a_limit_speaks_the_name_that_the_client_used() -> None:
    body = ChatCompletionRequest.model_validate_json(
        '{"messages": [], "max_completion_tokens": 5, "guided_json": {}, "logprobs": true, "top_logprobs": 2}'
    )
    request, names = chat_request(body)
    assert request.sampling.max_tokens == 5
    assert names.of("sampling.max_tokens") == "max_completion_tokens"
    assert names.of("sampling.logprobs") == "top_logprobs"
    assert names.of("constraint.json_schema") == "guided_json"
    assert names.of("tools[2].parameters_json_schema") == "tools[2].function.parameters"


async def test_an_answer_of_the_official_client_can_be_sent_back_as_it_is() -> None:
    async with front() as f:
        f.answer([*encode(PARIS), EOS], reason="STOP", stop_token_id=EOS)
        first: Any = {"role": "user", "content": "Hi"}
        async with f.openai.chat.completions.stream(model="tiny", messages=[first]) as stream:
            parsed: Any = (await stream.get_final_completion()).choices[0].message
        plain: Any = (await f.openai.chat.completions.create(model="tiny", messages=[first])).choices[0].message
        for answer in (parsed, plain):
            again = await f.openai.chat.completions.create(model="tiny", messages=[first, answer.model_dump(), first])
            assert again.choices[0].message.content == PARIS
