"""Conversations and choices on the embedded model."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoTokenizer

from glmserve.inference.v1 import inference_pb2 as pb
from router.conversation import render
from router.model import TextModel
from router.tools import check_tools
from tests.e2e.client import Answer, generate, request

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": " 你好 🙂\n"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! <b>"},
        {"role": "user", "content": ""},
    ],
]
LONG_PROMPT = "One of the things that I like about the sea is that it is never the same. " * 6


def chat_request(chat: list[dict[str, str]], **fields: Any) -> pb.ChatRequest:
    made = pb.ChatRequest(**fields)
    for message in chat:
        made.messages.add(role=pb.Role.Value(f"ROLE_{message['role'].upper()}"), content=message["content"])
    return made


async def choices(client: Client, asked: pb.GenerateRequest) -> dict[int, Answer]:
    made: dict[int, Answer] = defaultdict(Answer)
    async for response in client.Generate(asked):
        made[response.choice].add(response)
    return dict(made)


@pytest.mark.parametrize("chat", CHATS)
def test_rendering_equals_apply_chat_template(model_dir: Path, chat: list[dict[str, str]]) -> None:
    expected = AutoTokenizer.from_pretrained(model_dir).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    made = chat_request(chat)
    assert render(TextModel.load(model_dir), made, check_tools(made)).text == expected


async def test_a_chat_is_a_prompt_continued(client: Client, model_dir: Path) -> None:
    asked = chat_request(CHATS[0], sampling=pb.SamplingOptions(temperature=0, max_tokens=24), return_prompt_ids=True)
    messages = [message async for message in client.Chat(asked)]
    prompt = list(messages[0].prompt_ids)
    assert TextModel.load(model_dir).tokenizer.decode(prompt, skip_special_tokens=False).endswith("assistant\n")
    answer = await generate(client, prompt, max_tokens=24)
    assert "".join(message.content for message in messages) == answer.text != ""


async def test_choices_share_the_prompt_and_are_those_of_their_seeds(client: Client) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12}
    made = await choices(client, request(LONG_PROMPT, seed=7, n=3, **sampling))
    assert sorted(made) == [0, 1, 2]
    assert len({answer.text for answer in made.values()}) > 1
    for number, answer in made.items():
        alone = await generate(client, LONG_PROMPT, seed=7 + number, **sampling)
        assert (answer.token_ids, answer.finish.seed) == (alone.token_ids, 7 + number)
    prompt_tokens = made[0].finish.usage.prompt_tokens
    assert all(made[number].finish.usage.cached_prompt_tokens >= prompt_tokens - 16 for number in (1, 2))


async def test_the_best_of_several(client: Client) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 3, "logprobs": 0}
    all_of_them = await choices(client, request("The sea is", n=4, **sampling))
    best = await choices(client, request("The sea is", n=2, best_of=4, **sampling))

    def mean(answer: Answer) -> float:
        return sum(entry.logprob for entry in answer.logprobs) / len(answer.logprobs)

    ranked = sorted(all_of_them.values(), key=mean, reverse=True)
    assert [best[0].text, best[1].text] == [answer.text for answer in ranked[:2]]


async def test_echo(client: Client) -> None:
    plain = request("The capital of France is", max_tokens=4)
    echoed = request("The capital of France is", max_tokens=4)
    echoed.echo = True
    [first] = (await choices(client, plain)).values()
    [second] = (await choices(client, echoed)).values()
    assert second.text == "The capital of France is" + first.text
