"""Generate, Chat and the unary calls, from a client's socket to the worker's and back."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from tests.unit.router_harness import EOS, MAX_CONTEXT, VOCAB_SIZE, Bench, bench, byte_ids, encode, step, text_model


def generate(prompt: str = "The capital", **sampling: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=prompt, sampling=inference_pb2.SamplingOptions(**sampling))


def answer_with(b: Bench, *chunks: list[int], reason: str = "LENGTH", **fields: Any) -> None:
    """The worker answers each request with these ids, a response each, and finishes with the last."""

    def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
        *head, last = chunks
        return [step(submit.request_id, ids) for ids in head] + [step(submit.request_id, last, reason, **fields)]

    b.worker.answer = answer


async def collect(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


def text_of(responses: list[Any]) -> str:
    return "".join(response.text for response in responses)


def ids_of(responses: list[Any]) -> list[int]:
    return [token_id for response in responses for token_id in response.token_ids]


async def test_generate_streams_text_and_ends_with_finish_usage_and_timings() -> None:
    async with bench() as b:
        ids = encode(" of France is Paris")
        call = b.client.Generate(generate(seed=7, max_tokens=40, temperature=0.0))
        submit = await b.worker.submits.get()
        assert list(submit.prompt_token_ids) == encode("The capital")
        assert submit.sampling.seed == 7
        assert submit.sampling.max_tokens == 40
        assert submit.sampling.temperature == 0.0
        assert not submit.sampling.HasField("top_p")
        assert not submit.HasField("timeout_ms")
        responses = []
        for token_id in ids:
            b.worker.tokens(submit.request_id, [token_id])
            responses.append(await call.read())
        usage = engine_pb2.Usage(prompt_tokens=2, cached_prompt_tokens=2, completion_tokens=len(ids), queue_us=5)
        b.worker.finish(submit.request_id, usage=usage)
        responses += await collect(call)
        assert text_of(responses) == " of France is Paris"
        assert ids_of(responses) == ids
        assert {response.request_id for response in responses} == {submit.trace_id}
        assert not any(response.HasField("finish") for response in responses[:-1])
        finish = responses[-1].finish
        assert finish.reason == inference_pb2.FINISH_REASON_LENGTH
        assert finish.WhichOneof("stop") is None
        assert finish.seed == 7
        assert finish.usage.prompt_tokens == len(encode("The capital"))
        assert finish.usage.cached_prompt_tokens == 2
        assert finish.usage.completion_tokens == len(ids)
        assert 0 < finish.timings.queue_us <= finish.timings.first_token_us <= finish.timings.total_us


async def test_seed_is_drawn_and_reported_when_unset() -> None:
    async with bench() as b:
        calls = [b.client.Generate(generate()) for _ in range(2)]
        seeds = set()
        for call in calls:
            submit = await b.worker.submits.get()
            b.worker.finish(submit.request_id)
            [response] = await collect(call)
            seeds.add(response.finish.seed)
        assert len(seeds) == 2


async def test_unset_values_take_the_checkpoint_defaults_and_max_tokens_what_is_left() -> None:
    model = dataclasses.replace(text_model(), defaults={"temperature": 0.75, "top_k": 5, "max_tokens": 1000})
    async with bench(model) as b:
        call = b.client.Generate(generate("a", top_k=9))
        submit = await b.worker.submits.get()
        assert submit.sampling.temperature == 0.75
        assert submit.sampling.top_k == 9
        assert submit.sampling.max_tokens == MAX_CONTEXT - len(encode("a"))
        call.cancel()


async def test_prompt_ids_pass_through_and_come_back_once_on_request() -> None:
    async with bench() as b:
        prompt = inference_pb2.TokenIds(ids=[1, 2, VOCAB_SIZE - 1])
        call = b.client.Generate(inference_pb2.GenerateRequest(prompt_ids=prompt, return_prompt_ids=True, priority=-3))
        submit = await b.worker.submits.get()
        assert list(submit.prompt_token_ids) == [1, 2, VOCAB_SIZE - 1]
        assert submit.priority == -3
        b.worker.tokens(submit.request_id, encode("a"))
        first = await call.read()
        b.worker.finish(submit.request_id)
        [last] = await collect(call)
        assert list(first.prompt_ids) == [1, 2, VOCAB_SIZE - 1]
        assert not last.prompt_ids


async def test_a_stop_id_ends_the_request_and_its_text_is_left_out() -> None:
    async with bench() as b:
        stop_id = encode("!")[-1]
        answer_with(b, [*encode("Paris"), stop_id], reason="STOP", stop_token_id=stop_id)
        responses = await collect(b.client.Generate(generate(stop_token_ids=[stop_id])))
        assert text_of(responses) == "Paris"
        assert ids_of(responses) == [*encode("Paris"), stop_id]
        assert responses[-1].finish.reason == inference_pb2.FINISH_REASON_STOP
        assert responses[-1].finish.stop_token_id == stop_id
        assert responses[-1].finish.usage.completion_tokens == len(encode("Paris")) + 1


async def test_a_stop_string_across_steps_ends_the_text_aborts_the_worker_and_counts_what_it_took() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(stop=["France"]))
        submit = await b.worker.submits.get()
        ids = byte_ids(b"of Fran")
        for token_id in ids:
            b.worker.tokens(submit.request_id, [token_id])
        b.worker.tokens(submit.request_id, byte_ids(b"ce is not seen"))
        assert await b.worker.aborts.get() == submit.request_id
        usage = engine_pb2.Usage(prompt_tokens=2, cached_prompt_tokens=1, completion_tokens=99)
        b.worker.finish(submit.request_id, byte_ids(b"nor this"), "ABORTED", usage=usage)
        responses = await collect(call)
        assert text_of(responses) == "of "
        assert ids_of(responses) == byte_ids(b"of France")
        finish = responses[-1].finish
        assert (finish.reason, finish.stop_string) == (inference_pb2.FINISH_REASON_STOP, "France")
        assert finish.usage.completion_tokens == len(b"of France")
        assert finish.usage.cached_prompt_tokens == 1
        assert b.worker.aborts.empty()


async def test_a_stop_string_within_the_last_chunk_needs_no_abort() -> None:
    async with bench() as b:
        answer_with(b, byte_ids(b"one two three"))
        responses = await collect(b.client.Generate(generate(stop=[" t", "three"])))
        assert text_of(responses) == "one"
        assert responses[-1].finish.stop_string == " t"
        assert responses[-1].finish.usage.completion_tokens == len("one t")
        assert b.worker.aborts.empty()


async def test_a_stop_string_that_is_complete_survives_the_loss_of_the_worker() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(stop=["two"]))
        submit = await b.worker.submits.get()
        b.worker.tokens(submit.request_id, byte_ids(b"one two"))
        await b.worker.aborts.get()
        await b.stop_worker()
        responses = await collect(call)
        assert text_of(responses) == "one "
        assert responses[-1].finish.stop_string == "two"


async def test_the_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    async with bench() as b:
        answer_with(b, byte_ids(b"one tw"))
        assert text_of(await collect(b.client.Generate(generate(stop=["two"])))) == "one tw"


async def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    async with bench() as b:
        answer_with(b, byte_ids(b"xxaxb"))
        responses = await collect(b.client.Generate(generate(stop=["x"], min_tokens=2)))
        assert text_of(responses) == "xxa"
        assert responses[-1].finish.usage.completion_tokens == 4


async def test_a_character_in_pieces_arrives_whole_and_ids_at_once() -> None:
    async with bench() as b:
        call = b.client.Generate(generate())
        submit = await b.worker.submits.get()
        seen = []
        for token_id in byte_ids("🙂".encode()):
            b.worker.tokens(submit.request_id, [token_id])
            seen.append((await call.read()).text)
        assert seen == ["", "", "", "🙂"]
        b.worker.finish(submit.request_id, byte_ids("🙂".encode()[:3]))
        assert (await call.read()).text == "\ufffd"


async def test_logprobs_carry_the_bytes_of_each_token() -> None:
    async with bench() as b:
        ids = byte_ids("é".encode())
        call = b.client.Generate(generate(logprobs=2))
        submit = await b.worker.submits.get()
        assert submit.sampling.logprobs == 2
        response = step(submit.request_id, ids, "LENGTH")
        for token_id in ids:
            response.outputs[0].logprobs.add(logprob=-0.5, top_token_ids=[token_id, EOS], top_logprobs=[-0.5, -2.0])
        b.worker.send(response)
        [message] = await collect(call)
        assert [logprob.token for logprob in message.logprobs] == ["é".encode()[:1], "é".encode()[1:]]
        assert [logprob.token_id for logprob in message.logprobs] == ids
        top = message.logprobs[0].top
        assert [(entry.token_id, entry.token, entry.logprob) for entry in top] == [
            (ids[0], "é".encode()[:1], -0.5),
            (EOS, b"<|endoftext|>", -2.0),
        ]


async def test_chat_renders_the_template_without_adding_special_tokens() -> None:
    async with bench() as b:
        request = inference_pb2.ChatRequest(
            messages=[
                inference_pb2.ChatMessage(role=inference_pb2.ROLE_SYSTEM, content="Be brief."),
                inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content="Hi"),
            ]
        )
        call = b.client.Chat(request)
        submit = await b.worker.submits.get()
        assert list(submit.prompt_token_ids) == encode("<|system|>Be brief.<|user|>Hi<|assistant|>")
        b.worker.finish(submit.request_id, encode("Hello"), "STOP", stop_token_id=None)
        [response] = await collect(call)
        assert response.content == "Hello"
        assert response.finish.reason == inference_pb2.FINISH_REASON_STOP


async def test_request_id_of_the_client_goes_all_the_way_and_back() -> None:
    async with bench() as b:
        call = b.client.Generate(generate(), metadata=(("x-request-id", "abc-1"),))
        submit = await b.worker.submits.get()
        b.worker.finish(submit.request_id)
        [response] = await collect(call)
        assert (submit.trace_id, response.request_id) == ("abc-1", "abc-1")
        assert dict(await call.initial_metadata())["x-request-id"] == "abc-1"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a/b"])
async def test_an_odd_request_id_is_replaced(given: str) -> None:
    async with bench() as b:
        answer_with(b, [])
        call = b.client.Generate(generate(), metadata=(("x-request-id", given),))
        [response] = await collect(call)
        assert response.request_id not in ("", given)


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with bench() as b:
        text = "naïve 你好 🙂<|user|>" + "long " * 1000
        ids = (await b.client.Tokenize(inference_pb2.TokenizeRequest(text=text))).ids
        assert list(ids) == encode(text)
        back = await b.client.Detokenize(inference_pb2.DetokenizeRequest(ids=ids))
        assert back.text == text
        plain = await b.client.Detokenize(inference_pb2.DetokenizeRequest(ids=ids, skip_special_tokens=True))
        assert plain.text == text.replace("<|user|>", "")


async def test_get_model_tells_what_the_worker_says() -> None:
    async with bench() as b:
        for name in ("", "tiny"):
            model = await b.client.GetModel(inference_pb2.GetModelRequest(model=name))
            assert (model.name, model.revision, model.max_context) == ("tiny", "r1", MAX_CONTEXT)
            assert list(model.eos_token_ids) == [EOS]


async def test_many_requests_at_once_each_get_their_own_ids() -> None:
    async with bench() as b:

        def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
            return [step(submit.request_id, submit.prompt_token_ids), step(submit.request_id, [], "LENGTH")]

        b.worker.answer = answer
        prompts = [f"codeword {index}" for index in range(64)]
        answers = await asyncio.gather(*(collect(b.client.Generate(generate(prompt))) for prompt in prompts))
        assert [text_of(responses) for responses in answers] == prompts


@pytest.mark.parametrize(
    ("method", "request_", "text"),
    [
        (
            "Generate",
            inference_pb2.GenerateRequest(prompt_ids=inference_pb2.TokenIds(ids=[10**9] * 100)),
            "prompt_ids.ids: 100 tokens leave no room",
        ),
        (
            "Chat",
            inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER)] * 2049),
            "messages: 2049 entries; allowed: 0 to 2048",
        ),
        (
            "Detokenize",
            inference_pb2.DetokenizeRequest(ids=[10**9] * (2**18 + 1)),
            "ids: 262145 entries; allowed: 0 to 262144",
        ),
    ],
)
async def test_long_lists_are_refused_before_their_entries_are_looked_at(method: str, request_: Any, text: str) -> None:
    async with bench() as b:
        call: Any = b.channel.unary_stream(
            f"/glmserve.inference.v1.InferenceService/{method}", request_serializer=type(request_).SerializeToString
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(request_).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in (caught.value.details() or "")


async def test_tokenising_takes_a_place_too() -> None:
    async with bench(max_requests=1) as b:
        running = b.client.Generate(inference_pb2.GenerateRequest(prompt="x"))
        submit = await b.worker.submits.get()
        for refused in (
            b.client.Tokenize(inference_pb2.TokenizeRequest(text="x")),
            b.client.Detokenize(inference_pb2.DetokenizeRequest(ids=[1])),
        ):
            assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        b.worker.finish(submit.request_id, encode("done"))
        assert [response.text async for response in running] == ["done"]
        await b.client.Tokenize(inference_pb2.TokenizeRequest(text="x"))
