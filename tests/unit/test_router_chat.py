"""Chat, from a client's socket to the worker's and back, with GLM's way of writing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from tests.unit.glm_templates import GLM_LINES, HERMES, OBSERVATION, glm_encode, glm_model
from tests.unit.router_harness import TEMPLATE, Bench, bench, byte_ids, step, text_model
from tests.unit.test_conversation import HISTORIES, TOOLS, chat_request

CONTEXT = 1 << 14
USER = HISTORIES["user"]
WEATHER = "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris </arg_value></tool_call>"
NOW = "<tool_call>now</tool_call>"
END = glm_encode(OBSERVATION)[0]


@dataclass
class Answer:
    """What the messages of one choice add up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[inference_pb2.ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: inference_pb2.Finish = field(default_factory=inference_pb2.Finish)

    def add(self, message: inference_pb2.ChatResponse) -> None:
        assert not self.finish.HasField("usage"), "a message after the last"
        self.content += message.content
        self.reasoning += message.reasoning
        self.token_ids += message.token_ids
        for piece in message.tool_calls:
            if piece.id:
                self.calls.append(inference_pb2.ToolCallDelta(index=piece.index))
            self.calls[piece.index].id += piece.id
            self.calls[piece.index].name += piece.name
            self.calls[piece.index].arguments_json += piece.arguments_json
        if message.HasField("finish"):
            self.finish = message.finish

    @property
    def called(self) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments_json)) for call in self.calls]


async def collect(call: Any) -> Answer:
    answer = Answer()
    async for message in call:
        answer.add(message)
    return answer


def glm_bench(template: str | None = None, **settings: Any) -> contextlib.AbstractAsyncContextManager[Bench]:
    return bench(glm_model() if template is None else glm_model(template), max_context=CONTEXT, **settings)


def says(b: Bench, text: str | Sequence[int], *, ends: bool = True) -> None:
    """The worker says `text`, an id at a time, and ends as GLM does or by its length."""
    ids = glm_encode(text) if isinstance(text, str) else list(text)

    def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
        steps = [step(submit.request_id, [token_id]) for token_id in ids]
        if ends:
            return [*steps, step(submit.request_id, [END], "STOP", stop_token_id=END)]
        return [*steps, step(submit.request_id, [], "LENGTH")]

    b.worker.answer = answer


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value.code(), caught.value.details() or ""


async def test_reasoning_content_and_calls_are_told_apart() -> None:
    async with glm_bench() as b:
        says(b, f"They ask.\n</think>I look.\n{WEATHER}{NOW}")
        answer = await collect(b.client.Chat(chat_request(USER, TOOLS)))
        assert (answer.reasoning, answer.content) == ("They ask.", "I look.")
        assert answer.called == [("weather", {"city": "Paris "}), ("now", {})]
        assert len({call.id for call in answer.calls}) == 2
        assert answer.finish.reason == inference_pb2.FINISH_REASON_TOOL_CALLS
        assert answer.finish.stop_token_id == END
        assert answer.finish.usage.completion_tokens == len(answer.token_ids)
        assert answer.finish.usage.reasoning_tokens == len(glm_encode("They ask.\n</think>"))


async def test_the_prompt_is_the_templates() -> None:
    async with glm_bench() as b:
        says(b, "</think>ok")
        request = chat_request(HISTORIES["calls"], TOOLS, return_prompt_ids=True, enable_thinking=False)
        [first, *others] = [message async for message in b.client.Chat(request)]
        submit = await b.worker.submits.get()
        assert list(submit.prompt_token_ids) == list(first.prompt_ids)
        assert not any(message.prompt_ids for message in others)
        model = glm_model()
        text = model.tokenizer.decode(first.prompt_ids, skip_special_tokens=False)
        assert text.startswith("[gMASK]<sop><|system|>")
        assert text.endswith("<tool_response>15</tool_response><|assistant|></think>")


async def test_without_thinking_the_answer_is_content() -> None:
    async with glm_bench() as b:
        says(b, "Paris.")
        answer = await collect(b.client.Chat(chat_request(USER, enable_thinking=False)))
        assert (answer.content, answer.reasoning) == ("Paris.", "")
        assert answer.finish.usage.reasoning_tokens == 0
        assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP


async def test_a_model_that_writes_its_own_think_tag() -> None:
    async with glm_bench(GLM_LINES) as b:
        says(b, "\n<think>hm</think>\nParis.")
        answer = await collect(b.client.Chat(chat_request(USER)))
        assert (answer.content, answer.reasoning) == ("Paris.", "hm")
        says(b, "\nParis.")
        answer = await collect(b.client.Chat(chat_request(USER)))
        assert (answer.content, answer.reasoning) == ("\nParis.", "")


async def test_hermes_calls_by_a_template_that_writes_them_so() -> None:
    async with glm_bench(HERMES) as b:
        says(b, 'So:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>')
        answer = await collect(b.client.Chat(chat_request(USER, TOOLS)))
        assert (answer.content, answer.called) == ("So:", [("weather", {"city": "Paris"})])


async def test_a_call_cut_by_the_length_is_no_finished_call() -> None:
    async with glm_bench() as b:
        says(b, f"</think>{NOW}<tool_call>weather<arg_key>city</arg_key><arg_value>Par", ends=False)
        answer = await collect(b.client.Chat(chat_request(USER, TOOLS)))
        assert [call.arguments_json for call in answer.calls] == ["{}", '{"city": "Par']
        assert answer.finish.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_end_of_turn_ids_end_the_answer_and_are_no_part_of_it() -> None:
    """Stopping is the worker's, whose ids of the checkpoint's generation_config.json the router has no part in."""
    async with glm_bench() as b:
        says(b, "</think>Done.")
        answer = await collect(b.client.Chat(chat_request(USER)))
        assert answer.content == "Done."
        assert answer.token_ids[-1] == END


async def test_no_tools_no_calls() -> None:
    async with glm_bench() as b:
        says(b, f"</think>{NOW}")
        for request in (
            chat_request(USER),
            chat_request(USER, TOOLS, tool_choice={"mode": "TOOL_MODE_NONE"}),
        ):
            answer = await collect(b.client.Chat(request))
            assert (answer.content, answer.calls) == (NOW, [])
            assert answer.finish.reason == inference_pb2.FINISH_REASON_STOP


async def test_one_call_at_most_without_parallel_calls() -> None:
    async with glm_bench() as b:
        call = b.client.Chat(chat_request(USER, TOOLS, parallel_tool_calls=False))
        submit = await b.worker.submits.get()
        ids = glm_encode(f"</think>{NOW}")
        b.worker.tokens(submit.request_id, [*ids, *glm_encode(NOW)])
        assert await b.worker.aborts.get() == submit.request_id
        b.worker.finish(submit.request_id, reason="ABORTED")
        answer = await collect(call)
        assert answer.called == [("now", {})]
        assert answer.token_ids == ids
        assert answer.finish.reason == inference_pb2.FINISH_REASON_TOOL_CALLS
        assert answer.finish.usage.completion_tokens == len(ids)
        assert not submit.sampling.HasField("constraint")


@pytest.fixture
async def glm() -> AsyncIterator[Bench]:
    async with glm_bench() as b:
        says(b, f"</think>{NOW}")
        yield b


@pytest.mark.parametrize(
    ("choice", "named"), [({"mode": "TOOL_MODE_REQUIRED"}, ["weather", "now"]), ({"name": "now"}, ["now"])]
)
async def test_a_forced_call_is_a_constraint_after_the_reasoning(
    glm: Bench, choice: dict[str, Any], named: list[str]
) -> None:
    answer = await collect(glm.client.Chat(chat_request(USER, TOOLS, tool_choice=choice)))
    constraint = (await glm.worker.submits.get()).sampling.constraint
    assert constraint.begin_after_token_id == glm_encode("</think>")[0]
    assert [name for name in ("weather", "now") if f'"{name}"' in constraint.lark] == named
    assert answer.finish.reason == inference_pb2.FINISH_REASON_TOOL_CALLS


async def test_tools_left_to_the_model_are_no_constraint_unless_strict(glm: Bench) -> None:
    request = chat_request(USER, TOOLS)
    await collect(glm.client.Chat(request))
    assert not (await glm.worker.submits.get()).sampling.HasField("constraint")
    request.tools[0].strict = True
    await collect(glm.client.Chat(request))
    assert (await glm.worker.submits.get()).sampling.constraint.lark


async def test_a_constraint_of_the_content(glm: Bench) -> None:
    schema = '{"type": "object"}'
    for thinking in (True, False):
        await collect(glm.client.Chat(chat_request(USER, constraint={"json_schema": schema}, enable_thinking=thinking)))
        constraint = (await glm.worker.submits.get()).sampling.constraint
        assert constraint.json_schema == schema
        assert constraint.HasField("begin_after_token_id") == thinking


async def test_constrained_content_beside_tools(glm: Bench) -> None:
    constraint = {"json_schema": '{"type": "object"}'}
    await collect(glm.client.Chat(chat_request(USER, TOOLS, constraint=constraint)))
    made = (await glm.worker.submits.get()).sampling.constraint
    assert "%json" in made.lark
    assert made.HasField("begin_after_token_id")
    none = {"mode": "TOOL_MODE_NONE"}
    await collect(glm.client.Chat(chat_request(USER, TOOLS, constraint=constraint, tool_choice=none)))
    assert (await glm.worker.submits.get()).sampling.constraint.json_schema == constraint["json_schema"]


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (chat_request(USER, constraint={}), "INVALID_ARGUMENT", "constraint: empty"),
        (chat_request(USER, constraint={"json_schema": "{"}), "INVALID_ARGUMENT", "constraint.json_schema: "),
        (chat_request(USER, constraint={"regex": "("}), "INVALID_ARGUMENT", "constraint.regex: "),
        (chat_request(USER, tool_choice={"name": "now"}), "INVALID_ARGUMENT", "tool_choice.name: 'now' is none"),
        (
            chat_request(USER, sampling={"prompt_logprobs": 0}),
            "INVALID_ARGUMENT",
            "sampling.prompt_logprobs: set; allowed only in a GenerateRequest",
        ),
        (chat_request([{**HISTORIES["calls"][2]}]), "INVALID_ARGUMENT", "messages[0].tool_call_id: 'call_1' is not"),
    ],
)
async def test_what_is_wrong_never_reaches_the_worker(
    glm: Bench, request_: inference_pb2.ChatRequest, code: str, text: str
) -> None:
    status, details = await refusal(glm.client.Chat(request_))
    assert (status.name, details[: len(text)]) == (code, text)
    assert glm.worker.submits.empty()


async def test_calls_in_an_unknown_syntax_are_unsupported() -> None:
    async with glm_bench("{{ tools }}[CALL]") as b:
        says(b, "hi")
        code, details = await refusal(b.client.Chat(chat_request(USER, TOOLS)))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert details.startswith("tools: ")
        none = chat_request(USER, TOOLS, tool_choice={"mode": "TOOL_MODE_NONE"})
        assert (await collect(b.client.Chat(none))).content == "hi"


async def test_a_constraint_needs_an_end_of_reasoning_that_is_a_token() -> None:
    model = text_model().of(text_model().tokenizer, glm_model().template, {})
    async with bench(model, max_context=CONTEXT) as b:
        code, details = await refusal(b.client.Chat(chat_request(USER, constraint={"regex": "a"})))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "</think>" in details


async def test_a_stop_string_ends_the_content_and_not_the_reasoning() -> None:
    async with glm_bench() as b:
        call = b.client.Chat(chat_request(USER, sampling={"stop": ["END"]}))
        submit = await b.worker.submits.get()
        ids = [*byte_ids(b"hm END"), *glm_encode("</think>"), *byte_ids(b"one END")]
        b.worker.tokens(submit.request_id, [*ids, *byte_ids(b" two")])
        await b.worker.aborts.get()
        b.worker.finish(submit.request_id, reason="ABORTED")
        answer = await collect(call)
        assert (answer.reasoning, answer.content) == ("hm END", "one ")
        assert answer.token_ids == ids
        assert answer.finish.stop_string == "END"


async def test_characters_in_pieces_arrive_whole_in_every_part() -> None:
    async with glm_bench() as b:
        ids = [*byte_ids("思".encode()), *glm_encode("</think>"), *byte_ids("答🙂".encode())]
        ids += [*glm_encode("<tool_call>weather<arg_key>city</arg_key><arg_value>"), *byte_ids("東京".encode())]
        says(b, [*ids, *glm_encode("</arg_value></tool_call>")])
        answer = await collect(b.client.Chat(chat_request(USER, TOOLS)))
        assert (answer.reasoning, answer.content, answer.called) == ("思", "答🙂", [("weather", {"city": "東京"})])


async def test_a_call_outlives_its_worker() -> None:
    async with glm_bench(failover_wait_s=30) as b:
        call = b.client.Chat(chat_request(USER, TOOLS))
        submit = await b.worker.submits.get()
        ids = [*glm_encode(f"hm</think>{WEATHER}"), END]
        b.worker.tokens(submit.request_id, ids[:-4])
        answer = Answer()
        while len(answer.token_ids) < len(ids) - 4:
            answer.add(await call.read())
        await b.stop_worker()
        await b.start_worker()
        again = await b.worker.submits.get()
        assert list(again.generated_token_ids) == ids[:-4]
        b.worker.finish(again.request_id, ids[-4:], "STOP", stop_token_id=END)
        while (message := await call.read()) is not grpc.aio.EOF:
            answer.add(message)
        assert (answer.reasoning, answer.called) == ("hm", [("weather", {"city": "Paris "})])
        assert answer.finish.reason == inference_pb2.FINISH_REASON_TOOL_CALLS


async def test_a_conversation_goes_on_with_what_was_answered() -> None:
    async with glm_bench() as b:
        says(b, f"They ask.</think>{WEATHER}")
        request = chat_request(USER, TOOLS)
        answer = await collect(b.client.Chat(request))
        said = request.messages.add(role=inference_pb2.ROLE_ASSISTANT, reasoning=answer.reasoning)
        [made] = answer.calls
        said.tool_calls.add(id=made.id, name=made.name, arguments_json=made.arguments_json)
        request.messages.add(role=inference_pb2.ROLE_TOOL, tool_call_id=made.id, content="12")
        request.return_prompt_ids = True
        first = await b.client.Chat(request).read()
        text = glm_model().tokenizer.decode(first.prompt_ids, skip_special_tokens=False)
        expected = (
            f"<think>They ask.</think>{WEATHER}{OBSERVATION}<tool_response>12</tool_response><|assistant|><think>"
        )
        assert text.endswith(expected)


async def test_tools_by_a_template_that_shows_none() -> None:
    async with glm_bench(TEMPLATE) as b:
        says(b, '<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        answer = await collect(b.client.Chat(chat_request(USER, TOOLS)))
        assert answer.called == [("now", {})]
