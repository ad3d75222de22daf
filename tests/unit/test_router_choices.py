"""Several choices of one prompt, the best of several, echo, suffix, and log-probabilities of the prompt."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import grpc
import pytest

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from tests.unit.glm_templates import glm_encode, glm_model
from tests.unit.router_harness import Bench, bench, byte_ids, encode, step
from tests.unit.test_conversation import HISTORIES, TOOLS, chat_request
from tests.unit.test_router_service import answer_with, collect, generate, ids_of, text_of

SEEDS = 1 << 64


async def next_submits(b: Bench, count: int) -> list[engine_pb2.Submit]:
    return [await b.worker.submits.get() for _ in range(count)]


def by_choice(responses: list[Any]) -> dict[int, list[Any]]:
    choices = defaultdict(list)
    for response in responses:
        choices[response.choice].append(response)
    return dict(choices)


async def test_the_others_begin_when_the_first_has_its_first_token() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(n=3, seed=SEEDS - 2))
        first = await b.worker.submits.get()
        other = b.client.Generate(generate("other"))
        assert (await b.worker.submits.get()).prompt_token_ids == encode("other")
        other.cancel()
        b.worker.tokens(first.request_id, encode("a"))
        others = await next_submits(b, 2)
        assert [submit.sampling.seed for submit in (first, *others)] == [SEEDS - 2, SEEDS - 1, 0]
        assert all(submit.prompt_token_ids == first.prompt_token_ids for submit in others)
        for submit, text in zip((*others, first), ("b", "c", "d"), strict=True):
            b.worker.finish(submit.request_id, encode(text), usage=engine_pb2.Usage(cached_prompt_tokens=1))
        choices = by_choice(await collect(call))
        assert {number: text_of(parts) for number, parts in choices.items()} == {0: "ad", 1: "b", 2: "c"}
        for number, parts in choices.items():
            assert [part.HasField("finish") for part in parts] == [False] * (len(parts) - 1) + [True]
            finish = parts[-1].finish
            assert finish.usage.completion_tokens == len(ids_of(parts))
            assert finish.seed == (SEEDS - 2 + number) % SEEDS


async def test_a_choice_may_stop_while_others_go_on() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(n=2, stop=["END"]))
        first = await b.worker.submits.get()
        b.worker.tokens(first.request_id, byte_ids(b"one END"))
        [second] = await next_submits(b, 1)
        assert await b.worker.aborts.get() == first.request_id
        b.worker.finish(first.request_id, reason="ABORTED")
        b.worker.finish(second.request_id, byte_ids(b"two"))
        choices = by_choice(await collect(call))
        assert {number: text_of(parts) for number, parts in choices.items()} == {0: "one ", 1: "two"}
        assert choices[0][-1].finish.stop_string == "END"
        assert choices[1][-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_a_client_that_leaves_aborts_every_choice() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(n=3))
        first = await b.worker.submits.get()
        b.worker.tokens(first.request_id, encode("a"))
        submits = [first, *await next_submits(b, 2)]
        call.cancel()
        aborted = {await b.worker.aborts.get() for _ in submits}
        assert aborted == {submit.request_id for submit in submits}


async def test_a_choice_that_fails_fails_the_request_and_ends_the_others() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(n=2))
        first = await b.worker.submits.get()
        b.worker.tokens(first.request_id, encode("a"))
        [second] = await next_submits(b, 1)
        b.worker.finish(second.request_id, reason="NUMERICAL_ERROR")
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(call)
        assert await b.worker.aborts.get() == first.request_id


async def test_the_deadline_ends_every_choice() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(n=2), timeout=1.0)
        first = await b.worker.submits.get()
        b.worker.tokens(first.request_id, encode("a"))
        submits = [first, *await next_submits(b, 1)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert {await b.worker.aborts.get() for _ in submits} == {submit.request_id for submit in submits}


async def test_choices_take_a_place_each() -> None:
    async with bench(max_requests=4) as b:
        running = b.client.Generate(generate(n=3), metadata=(("x-request-id", "a"),))
        submit = await b.worker.submits.get()
        code = await b.client.Generate(generate(n=2)).code()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
        assert await b.worker.aborts.get() == submit.request_id
        answer_with(b, encode("x"))
        assert len(by_choice(await collect(b.client.Generate(generate(n=4))))) == 4


async def test_many_choices_of_a_slow_reader_lose_nothing() -> None:
    async with bench(max_context=1 << 12) as b:
        answer_with(b, *([[token_id] for token_id in byte_ids(b"abcdefgh" * 100)]))
        call = b.client.Generate(generate(n=8))
        choices = by_choice(await collect(call))
        assert {text_of(parts) for parts in choices.values()} == {"abcdefgh" * 100}
        assert sorted(choices) == list(range(8))


def answer_logprobs(b: Bench, *answers: tuple[str, float]) -> None:
    """Each choice gets the next answer, every token of it with this log-probability."""
    left = list(answers)

    def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
        text, logprob = left.pop(0)
        response = step(submit.request_id, byte_ids(text.encode()), "LENGTH")
        assert submit.sampling.HasField("logprobs")
        for _ in text:
            response.outputs[0].logprobs.add(logprob=logprob)
        return [response]

    b.worker.answer = answer


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_the_best_are_those_of_the_largest_mean_log_probability(logprobs: int | None) -> None:
    async with bench() as b:
        answer_logprobs(b, ("worst", -3.0), ("second best", -1.0), ("best of all", -0.5), ("third", -1.5))
        responses = await collect(b.client.Generate(generate(n=2, best_of=4, logprobs=logprobs)))
        assert [(response.choice, response.text) for response in responses] == [(0, "best of all"), (1, "second best")]
        assert [len(response.logprobs) for response in responses] == ([0, 0] if logprobs is None else [11, 11])
        assert [response.finish.usage.completion_tokens for response in responses] == [11, 11]
        assert len({response.finish.seed for response in responses}) == 2


async def test_best_of_n_is_n_choices() -> None:
    async with bench() as b:
        answer_with(b, encode("a"))
        responses = await collect(b.client.Generate(generate(n=2, best_of=2)))
        assert len(by_choice(responses)) == 2
        assert not (await b.worker.submits.get()).sampling.HasField("logprobs")


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"n": 0}, "sampling.n: 0 is not allowed; allowed: 1 to 16"),
        ({"n": 17}, "sampling.n: 17 is not allowed; allowed: 1 to 16"),
        ({"best_of": 17}, "sampling.best_of: 17 is not allowed; allowed: 1 to 16"),
        ({"n": 3, "best_of": 2}, "sampling.best_of: 2 is not allowed; allowed: n = 3 to 16"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs: 21 is not allowed; allowed: 0 to 20"),
    ],
)
async def test_numbers_of_choices_are_checked(sampling: dict[str, Any], text: str) -> None:
    async with bench() as b:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(b.client.Generate(generate(**sampling)))
        assert caught.value.details() == text


async def test_chat_has_choices_too() -> None:
    async with bench(glm_model(), max_context=1 << 12) as b:
        ids = glm_encode("hm</think>Yes")
        answer_with(b, *([token_id] for token_id in ids))
        request = chat_request(HISTORIES["user"], sampling={"n": 2})
        choices = by_choice(await collect(b.client.Chat(request)))
        for parts in choices.values():
            assert "".join(part.reasoning for part in parts) == "hm"
            assert "".join(part.content for part in parts) == "Yes"
        assert sorted(choices) == [0, 1]


async def test_best_of_keeps_calls_whole() -> None:
    async with bench(glm_model(), max_context=1 << 12) as b:
        ids = glm_encode("</think><tool_call>weather<arg_key>city</arg_key><arg_value>one two</arg_value></tool_call>")

        def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
            steps = [step(submit.request_id, [token_id]) for token_id in ids]
            for each in steps:
                each.outputs[0].logprobs.add(logprob=-1.0)
            return [*steps, step(submit.request_id, [], "LENGTH")]

        b.worker.answer = answer
        request = chat_request(HISTORIES["user"], TOOLS, sampling={"best_of": 2})
        [message] = await collect(b.client.Chat(request))
        [call] = message.tool_calls
        assert (call.name, call.arguments_json, message.token_ids) == ("weather", '{"city": "one two"}', ids)


async def test_echo_begins_with_the_prompt() -> None:
    async with bench() as b:
        answer_with(b, encode(" of France"))
        request = generate("The capital<|user|>", n=2, stop=["capital"])
        request.echo = True
        for parts in by_choice(await collect(b.client.Generate(request))).values():
            assert text_of(parts) == "The capital<|user|> of France"


@pytest.mark.parametrize(("rest", "text"), [(b"\x99\x82!", "a🙂!"), (b"b", "a\ufffdb"), (b"", "a\ufffd")])
async def test_echo_of_a_prompt_that_ends_within_a_character(rest: bytes, text: str) -> None:
    async with bench() as b:
        answer_with(b, byte_ids(rest))
        ids = byte_ids(b"a\xf0\x9f")
        request = inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=ids), echo=True)
        assert text_of(await collect(b.client.Generate(request))) == text


async def test_a_suffix_is_shown_before_the_gap_is_filled() -> None:
    async with bench(glm_model()) as b:
        answer_with(b, glm_encode("x"))
        request = inference_pb2.GenerateRequest(prompt="def f(", suffix="): pass")
        await collect(b.client.Generate(request))
        expected = "<|code_prefix|>def f(<|code_suffix|>): pass<|code_middle|>"
        assert list((await b.worker.submits.get()).prompt_token_ids) == glm_encode(expected)


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"suffix": "x"}, "UNIMPLEMENTED", "suffix: the checkpoint fills no gaps"),
        ({"suffix": "x", "echo": True}, "INVALID_ARGUMENT", "echo: set together with suffix"),
    ],
)
async def test_a_suffix_needs_a_checkpoint_that_fills_gaps(fields: dict[str, Any], code: str, text: str) -> None:
    async with bench() as b:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(b.client.Generate(inference_pb2.GenerateRequest(prompt="a", **fields)))
        assert caught.value.code().name == code
        assert (caught.value.details() or "").startswith(text)


async def test_log_probabilities_of_the_prompt_come_first_in_every_choice() -> None:
    async with bench() as b:
        ids = encode("The capital")

        def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
            response = step(submit.request_id, encode("x"), "LENGTH")
            if submit.sampling.HasField("prompt_logprobs"):
                response.outputs[0].prompt_logprobs.add()
                for token_id in ids[1:]:
                    response.outputs[0].prompt_logprobs.add(logprob=-2, top_token_ids=[token_id], top_logprobs=[-2])
            return [response]

        b.worker.answer = answer
        responses = await collect(b.client.Generate(generate("The capital", n=2, prompt_logprobs=1)))
        submits = await next_submits(b, 2)
        assert [submit.sampling.HasField("prompt_logprobs") for submit in submits] == [True, False]
        for response in responses:
            assert [entry.token_id for entry in response.prompt_logprobs] == ids
            first, *others = response.prompt_logprobs
            assert (first.logprob, len(first.top)) == (0, 0)
            assert [(entry.logprob, entry.top[0].token_id) for entry in others] == [
                (-2, token_id) for token_id in ids[1:]
            ]


async def test_log_probabilities_of_the_prompt_need_an_engine_that_computes_them() -> None:
    async with bench() as b:
        await b.stop_worker()
        await b.wait_health(False)
        b.worker.info.prompt_logprobs = False
        await b.start_worker()
        await b.wait_health(True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(b.client.Generate(generate(prompt_logprobs=0)))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert (caught.value.details() or "").startswith("sampling.prompt_logprobs: ")


async def test_a_moved_request_asks_for_the_prompts_log_probabilities_once() -> None:
    async with bench(failover_wait_s=30) as b:
        call = b.client.Generate(generate("a", prompt_logprobs=0))
        submit = await b.worker.submits.get()
        b.worker.tokens(submit.request_id, encode("x"))
        await call.read()
        await b.stop_worker()
        await b.start_worker()
        again = await b.worker.submits.get()
        assert not again.sampling.HasField("prompt_logprobs")
        with contextlib.suppress(asyncio.CancelledError):
            call.cancel()
