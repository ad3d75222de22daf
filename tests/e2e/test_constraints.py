"""Structured output of the embedded model, which by itself would never write it."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from glmserve.inference.v1 import inference_pb2 as pb
from tests.e2e.client import Answer, generate, request

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

# Short, and finite: every one of them ends well before max_tokens.
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue", 7, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}]},
    {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/point"}, "tag": {"const": "é日"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "array",
                "items": {"type": "integer", "minimum": -9, "maximum": 9},
                "minItems": 2,
                "maxItems": 2,
            }
        },
    },
    {"type": "string", "maxLength": 12},
]
GENERATIONS = 200
AT_ONCE = 32
PROMPT = "The capital of France is"


async def constrained(client: Client, constraint: pb.OutputConstraint, **sampling: Any) -> Answer:
    asked = request(PROMPT, **{"max_tokens": 400, **sampling})
    asked.constraint.CopyFrom(constraint)
    answer = Answer()
    async for response in client.Generate(asked):
        answer.add(response)
    return answer


async def test_every_generation_is_valid_by_its_schema(client: Client) -> None:
    room = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int, schema: dict[str, Any]) -> str:
        async with room:
            constraint = pb.OutputConstraint(json_schema=json.dumps(schema))
            answer = await constrained(client, constraint, temperature=1.0, seed=seed)
        assert answer.finish.reason == pb.FINISH_REASON_STOP, (seed, repr(answer.text))
        jsonschema.validate(json.loads(answer.text), schema, cls=jsonschema.Draft202012Validator)
        return answer.text

    schemas = itertools.islice(itertools.cycle(SCHEMAS), GENERATIONS)
    texts = await asyncio.gather(*(one(seed, schema) for seed, schema in enumerate(schemas)))
    assert len(set(texts)) > GENERATIONS / 4


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        (pb.OutputConstraint(regex="[0-9]{4}-(0[1-9]|1[0-2])"), r"\d{4}-(0[1-9]|1[0-2])"),
        (pb.OutputConstraint(choices=pb.Choices(texts=["Paris", "Pa", "a.b*\n日"])), r"Paris|Pa|a\.b\*\n日"),
        (
            pb.OutputConstraint(grammar='start: "<" (word ",")* word ">"\nword: /[a-z]{1,3}/ | "é"'),
            r"<([a-zé]{1,3},)*[a-zé]{1,3}>",
        ),
    ],
)
async def test_regex_choices_and_grammar(client: Client, constraint: pb.OutputConstraint, pattern: str) -> None:
    answers = await asyncio.gather(
        *(constrained(client, constraint, temperature=1.0, seed=seed, top_p=0.9) for seed in range(8))
    )
    for answer in answers:
        assert answer.finish.reason == pb.FINISH_REASON_STOP
        assert re.fullmatch(pattern, answer.text)


async def test_a_seed_gives_the_same_alone_and_in_a_crowd_and_others_are_as_ever(client: Client) -> None:
    constraint = pb.OutputConstraint(json_schema=json.dumps(SCHEMAS[0]))
    alone = await constrained(client, constraint, temperature=1.0, seed=3, logprobs=1)
    free = await generate(client, PROMPT, max_tokens=20, temperature=1.0, seed=4)
    crowd = await asyncio.gather(
        constrained(client, constraint, temperature=1.0, seed=3, logprobs=1),
        generate(client, PROMPT, max_tokens=20, temperature=1.0, seed=4),
        *(constrained(client, constraint, temperature=1.0, seed=seed) for seed in range(10, 20)),
        *(generate(client, PROMPT, max_tokens=20) for _ in range(4)),
    )
    assert crowd[0].token_ids == alone.token_ids
    assert [entry.logprob for entry in crowd[0].logprobs] == [entry.logprob for entry in alone.logprobs]
    assert crowd[1].token_ids == free.token_ids
