"""/v1/messages through Anthropic's client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.http.answer import ChatAnswer
from router.http.message_events import MessageEvents
from router.http.message_request import message_request
from router.http.messages import whole_message
from router.http.schema_anthropic import MessageRequest
from tests.unit.http_harness import HELLO, front
from tests.unit.router_harness import EOS, encode

PARIS = " of France is Paris"


def translated(**body: Any) -> inference_pb2.ChatRequest:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, **body}
    return message_request(MessageRequest.model_validate_json(json.dumps(body)))[0]


async def test_a_message_is_the_same_whole_and_streamed() -> None:
    async with front() as f:
        f.answer(*([token_id] for token_id in [*encode(PARIS), EOS]), reason="STOP", stop_token_id=EOS)
        request: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "messages": HELLO, "system": "Be brief."}
        whole = await f.anthropic.messages.create(**request)
        assert (whole.role, whole.stop_reason, whole.model) == ("assistant", "end_turn", "tiny")
        assert [(block.type, getattr(block, "text", "")) for block in whole.content] == [("text", PARIS)]
        async with f.anthropic.messages.stream(**request) as stream:
            streamed = await stream.get_final_message()
        assert [getattr(block, "text", "") for block in streamed.content] == [PARIS]
        assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
        assert streamed.usage.input_tokens == whole.usage.input_tokens > 0


async def test_tokens_are_counted_without_an_answer() -> None:
    async with front() as f:
        counted = await f.anthropic.messages.count_tokens(model="tiny", messages=HELLO)
        assert counted.input_tokens == len(encode("<|user|>Hi<|assistant|>"))
        assert f.worker.submits.empty()


async def test_errors_have_this_apis_form() -> None:
    async with front() as f:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await f.anthropic.messages.create(
                model="tiny", max_tokens=20, messages=HELLO, extra_body={"temperature": 9}
            )
        assert caught.value.body["type"] == "error"  # type: ignore[index]
        assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
        assert "temperature" in caught.value.message
        with pytest.raises(anthropic.NotFoundError):
            await f.anthropic.messages.create(model="other", max_tokens=20, messages=HELLO)


def test_blocks_become_turns() -> None:
    request = translated(
        system=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"city": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
    )
    system, first, assistant, result, last = request.messages
    assert (system.role, system.content) == (inference_pb2.ROLE_SYSTEM, "a\nb")
    assert first.content == "Weather?"
    assert (assistant.reasoning, assistant.content) == ("hm", "I look.")
    assert json.loads(assistant.tool_calls[0].arguments_json) == {"city": "Rome"}
    assert (result.role, result.tool_call_id, result.content) == (inference_pb2.ROLE_TOOL, "t1", "sun")
    assert (last.role, last.content) == (inference_pb2.ROLE_USER, "And now?")


@pytest.mark.parametrize(
    ("given", "enabled"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "enabled", "budget_tokens": 1024}, True)],
)
def test_the_model_thinks_if_it_is_told_to(given: Any, enabled: bool) -> None:
    request = translated(thinking=given)
    assert request.HasField("enable_thinking")
    assert request.enable_thinking is enabled
    assert not translated(thinking={"type": "adaptive"}).HasField("enable_thinking")


def test_tools_and_their_choice() -> None:
    tools = [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}]
    request = translated(tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert request.tools[0].parameters_json_schema == '{"type": "object"}'
    assert request.tool_choice.mode == inference_pb2.TOOL_MODE_REQUIRED
    assert not request.parallel_tool_calls
    assert translated(tools=tools, tool_choice={"type": "tool", "name": "look"}).tool_choice.name == "look"
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert translated(output_config={"format": schema}).constraint.json_schema == '{"type": "object"}'


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "tool_use", "name": "f"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "tool_result"}]}], "messages[0].content[0].tool_use_id"),
    ],
)
def test_blocks_that_cannot_be_shown_are_refused_by_name(messages: list[Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        translated(messages=messages)
    assert caught.value.field == field


async def test_an_error_in_a_turn_counts_the_clients_turns() -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": "b"}]},
    ]
    body: dict[str, Any] = {"model": "tiny", "system": "Be brief.", "messages": turns}
    async with front() as f:
        for path, more in (("/v1/messages", {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
            answer = await f.http.post(path, json={**body, **more})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith("messages[2].tool_call_id:")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"days": 2.5}', {"days": 2.5}),
        ("", {}),
        ('{"city": "Ro', {}),
        ('{"days": NaN}', {}),
        ('{"days": -Infinity}', {}),
        ('{"days": 1e999}', {}),
        pytest.param('{"a": ' * 5000 + "1" + "}" * 5000, {}, id="deep"),
    ],
)
async def test_arguments_that_json_cannot_show_are_left_out(arguments: str, shown: Any) -> None:
    call = inference_pb2.ToolCallDelta(id="t1", name="f", arguments_json=arguments)
    finish = inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_TOOL_CALLS)

    async def responses() -> AsyncIterator[inference_pb2.ChatResponse]:
        yield inference_pb2.ChatResponse(tool_calls=[call], finish=finish)

    [block] = whole_message(await ChatAnswer.of(responses()), "tiny")["content"]
    assert block == {"type": "tool_use", "id": "t1", "name": "f", "input": shown}


def test_blocks_begin_and_end_one_after_another() -> None:
    call = inference_pb2.ToolCallDelta
    finish = inference_pb2.Finish(
        reason=inference_pb2.FINISH_REASON_TOOL_CALLS,
        usage=inference_pb2.Usage(prompt_tokens=9, cached_prompt_tokens=4, completion_tokens=7),
    )
    responses = [
        inference_pb2.ChatResponse(request_id="r", reasoning="hm", prompt_ids=range(9)),
        inference_pb2.ChatResponse(request_id="r", reasoning="!", content="I look."),
        inference_pb2.ChatResponse(request_id="r", tool_calls=[call(index=0, id="a", name="f")]),
        inference_pb2.ChatResponse(request_id="r", tool_calls=[call(index=0, arguments_json="{}")]),
        inference_pb2.ChatResponse(
            request_id="r", tool_calls=[call(index=1, id="b", name="g", arguments_json="{}")], finish=finish
        ),
    ]
    events = MessageEvents("tiny")
    sent = b"".join(map(events.of, responses)).decode().split("\n\n")[:-1]
    data = [json.loads(event.split("\ndata: ")[1]) for event in sent]
    assert [event["type"].removeprefix("content_block_") for event in data] == [
        "message_start",
        *("start", "delta", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("message_delta", "message_stop"),
    ]
    kinds = [event["content_block"]["type"] for event in data if event["type"] == "content_block_start"]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert data[0]["message"]["usage"]["input_tokens"] == 9
    assert data[-2]["delta"]["stop_reason"] == "tool_use"
    assert data[-2]["usage"]["input_tokens"] == 5
    assert data[-2]["usage"]["cache_read_input_tokens"] == 4
