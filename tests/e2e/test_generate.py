"""What a client of a healthy pair gets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from glmserve.inference.v1 import inference_pb2 as pb
from tests.e2e.client import generate
from tests.e2e.conftest import Worker

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "The three primary colours are",
    "In 1969, the first man on the Moon",
    "Roses are red,",
    "The opposite of hot is",
]


async def test_the_capital_of_france_is_paris(client: Client) -> None:
    answer = await generate(client, "The capital of France is", max_tokens=8)
    assert "Paris" in answer.text
    assert answer.finish.reason == pb.FINISH_REASON_LENGTH
    assert answer.finish.usage.completion_tokens == len(answer.token_ids) == 8
    assert answer.finish.usage.prompt_tokens == 5


async def test_it_streams(client: Client) -> None:
    answer = await generate(client, PROMPTS[1], max_tokens=64)
    assert answer.messages > 16


async def test_text_is_what_the_ids_decode_to(client: Client) -> None:
    answer = await generate(client, PROMPTS[1], max_tokens=48)
    decoded = await client.Detokenize(pb.DetokenizeRequest(ids=answer.token_ids, skip_special_tokens=True))
    assert answer.text == decoded.text


async def test_prompt_ids_equal_prompt_text(client: Client) -> None:
    ids = (await client.Tokenize(pb.TokenizeRequest(text=PROMPTS[0]))).ids
    by_text = await generate(client, PROMPTS[0], max_tokens=12)
    by_ids = await generate(client, list(ids), max_tokens=12)
    assert by_text.token_ids == by_ids.token_ids


async def test_timings_are_ordered(client: Client) -> None:
    timings = (await generate(client, PROMPTS[2], max_tokens=4)).finish.timings
    assert 0 < timings.first_token_us <= timings.total_us
    assert timings.queue_us <= timings.first_token_us


async def test_greedy_logprobs_name_the_sampled_token_first(client: Client) -> None:
    answer = await generate(client, PROMPTS[0], max_tokens=8, logprobs=3)
    assert len(answer.logprobs) == 8
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.token_id == token_id == entry.top[0].token_id
        assert entry.logprob == entry.top[0].logprob <= 0
        assert [top.logprob for top in entry.top] == sorted((top.logprob for top in entry.top), reverse=True)
    assert b"".join(entry.token for entry in answer.logprobs).decode() == answer.text


async def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    whole = await generate(client, PROMPTS[1], max_tokens=40)
    stop = whole.text[12:19]
    cut = await generate(client, PROMPTS[1], max_tokens=40, stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish.reason == pb.FINISH_REASON_STOP
    assert cut.finish.stop_string == stop


async def test_a_stop_id_ends_the_request(client: Client) -> None:
    whole = await generate(client, PROMPTS[1], max_tokens=20)
    stop = whole.token_ids[9]
    cut = await generate(client, PROMPTS[1], max_tokens=20, stop_token_ids=[stop])
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.finish.stop_token_id == stop


async def test_chat_ends_at_the_models_own_stop_id(client: Client) -> None:
    """A turn must not roll into the next one (fault 10)."""
    question = pb.ChatMessage(role=pb.ROLE_USER, content="What is the capital of France? Answer with one word.")
    sampling = pb.SamplingOptions(temperature=0, max_tokens=200)
    text, finish = "", pb.Finish()
    async for response in client.Chat(pb.ChatRequest(messages=[question], sampling=sampling)):
        text += response.content
        finish = response.finish
    assert "Paris" in text
    assert "<|im_end|>" not in text
    model = await client.GetModel(pb.GetModelRequest())
    assert finish.reason == pb.FINISH_REASON_STOP
    assert finish.stop_token_id in model.eos_token_ids


async def test_a_repeated_prompt_comes_out_of_the_prefix_cache(client: Client) -> None:
    prompt = "A long and winding introduction, so that pages fill. " * 8
    first = await generate(client, prompt, max_tokens=8)
    second = await generate(client, prompt, max_tokens=8)
    assert second.finish.usage.cached_prompt_tokens >= 64
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.1}])
async def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd_of_64(
    client: Client, worker: Worker, sampling: dict[str, float]
) -> None:
    alone = [await generate(client, prompt, max_tokens=12, **sampling) for prompt in PROMPTS]
    crowd = await asyncio.gather(
        *(generate(client, prompt, max_tokens=12 + i % 5, **sampling) for i, prompt in enumerate(PROMPTS * 8))
    )
    for i, answer in enumerate(crowd):
        assert answer.token_ids[:12] == alone[i % len(PROMPTS)].token_ids
    load = await worker.idle()
    assert load.free_pages + load.cached_pages == load.total_pages


async def test_different_seeds_differ(client: Client) -> None:
    answers = [await generate(client, PROMPTS[1], max_tokens=16, temperature=1.0, seed=seed) for seed in range(4)]
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


@pytest.mark.parametrize("count", [1, 2, 5, 16, 40])
async def test_each_of_n_concurrent_requests_echoes_its_own_codeword(client: Client, count: int) -> None:
    """State of one request never shows in another, at any batch size."""
    codewords = [f"{(i + 1) * 7919 % 100000:05d}" for i in range(count)]
    prompts = [f"The code is {word}. " * 6 + "The code is" for word in codewords]
    answers = await asyncio.gather(*(generate(client, prompt, max_tokens=8) for prompt in prompts))
    assert [word for word, answer in zip(codewords, answers, strict=True) if word not in answer.text] == []
