"""The official clients against a router with the embedded model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import jsonschema  # type: ignore[import-untyped]
import openai
import pytest

from deploy.local import LocalCluster
from tests.e2e.conftest import Worker

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "add_person", "description": "Adds one.", "parameters": PERSON}}


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def claude(cluster: LocalCluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=cluster.http, api_key="none", max_retries=0) as made:
        yield made


async def test_a_completion_knows_paris_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    request: dict[str, Any] = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = (await client.completions.create(**request)).choices[0].text
    assert "Paris" in whole
    stream = await client.completions.create(**request, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole


async def test_n_choices_and_echo(client: openai.AsyncOpenAI) -> None:
    prompt = "The capital of France is"
    answer = await client.completions.create(model="", prompt=prompt, n=3, seed=5, echo=True, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.text.startswith(prompt) for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 18)


async def test_a_chat_ends_by_itself_and_streams_the_same(client: openai.AsyncOpenAI) -> None:
    request: dict[str, Any] = {"model": "", "messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(**request)
    content = whole.choices[0].message.content
    assert content is not None and "Paris" in content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content is not None
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = await client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_an_answer_matches_its_schema(client: openai.AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = await client.chat.completions.create(
        model="", messages=QUESTION, response_format=wanted, seed=1, max_tokens=200
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)


async def test_a_wrong_schema_is_named(client: openai.AsyncOpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="", messages=QUESTION, response_format=wanted)
    assert caught.value.param is not None and caught.value.param.startswith("response_format")


async def test_a_required_call_is_the_same_whole_and_streamed(client: openai.AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "add_person"}}
    request: dict[str, Any] = {"model": "", "messages": QUESTION, "tools": [TOOL], "tool_choice": choice, "seed": 3}
    whole = await client.chat.completions.create(**request, max_tokens=300)
    assert whole.choices[0].finish_reason == "tool_calls"
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "add_person"
    jsonschema.validate(json.loads(call.function.arguments), PERSON)
    async with client.chat.completions.stream(**request, max_tokens=300) as stream:
        streamed = await stream.get_final_completion()
    [again] = streamed.choices[0].message.tool_calls or []
    assert again.function.arguments == call.function.arguments


async def test_messages_whole_and_streamed_with_a_tool(claude: anthropic.AsyncAnthropic) -> None:
    tool: Any = {"name": "add_person", "description": "Adds one.", "input_schema": PERSON}
    request: dict[str, Any] = {
        "model": "smollm2-135m-glm",
        "messages": QUESTION,
        "max_tokens": 600,
        "extra_body": {"temperature": 0},
    }
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    plain = await claude.messages.create(**request)
    async with claude.messages.stream(**request, tools=[tool], tool_choice=choice) as stream:
        message = await stream.get_final_message()
    assert plain.content[0].type == "text"
    assert message.stop_reason == "tool_use"
    [block] = [block for block in message.content if block.type == "tool_use"]
    jsonschema.validate(block.input, PERSON)


async def test_a_stream_that_is_left_frees_its_pages(client: openai.AsyncOpenAI, worker: Worker) -> None:
    more = {"ignore_eos": True}
    stream = await client.completions.create(
        model="", prompt="The story of the sea", stream=True, max_tokens=3000, extra_body=more
    )
    await anext(aiter(stream))
    await stream.close()
    while True:  # the last step's page is given back after the request
        load = await worker.idle()
        if load.free_pages + load.cached_pages == load.total_pages:
            break
