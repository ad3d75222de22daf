"""Constraints in the worker: compiled before a request is queued, followed token by token, on the scripted engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from engine_worker.constraints.compiler import MAX_TEXT_BYTES, ConstraintCompiler, ConstraintError
from glmserve.engine.v1 import engine_pb2
from tests.unit.constraint_tokens import CHARACTERS, END_OF_TEXT, END_OF_THINKING, small_text, write_small_tokenizer
from tests.unit.worker_harness import Ended, Stream, Worker, running_worker, submit, worker_limits

Constraint = engine_pb2.Constraint
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": [1, 2, "abc"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small_tokenizer(tmp_path)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


async def run(worker: Worker, *submits: engine_pb2.Submit) -> list[Ended]:
    async with worker.stream() as stream:
        await stream.send(*submits)
        return [await stream.end_of(each.request_id) for each in submits]


def constrained(
    number: int, constraint: Constraint, max_tokens: int = 100, *, min_tokens: int = 0, ignore_eos: bool = False
) -> engine_pb2.Submit:
    made = submit(number, [1, 2, number % 40], max_tokens, seed=number, ignore_eos=ignore_eos)
    made.sampling.constraint.CopyFrom(constraint)
    made.sampling.min_tokens = min_tokens
    return made


async def rejection_of(stream: Stream, number: int) -> engine_pb2.Rejection:
    rejection = (await stream.end_of(number)).rejection
    assert rejection is not None
    del stream.ends[number]
    return rejection


def check_schema(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"a", "b"} and value["a"] in (1, 2, "abc") and value["b"] in (True, False)


async def test_a_crowd_follows_its_schemas_alone_and_together(model: Path) -> None:
    """With few pages, so that some are preempted on the way; some have no constraint."""
    limits = worker_limits(num_pages=8, max_context=112)
    submits = [constrained(i, Constraint(json_schema=SCHEMA)) for i in range(1, 25)]
    plain = [submit(100 + i, [5, i], 30) for i in range(8)]
    async with running_worker(limits, model=model) as worker:
        together = await run(worker, *submits, *plain)
        stopped = 0
        for each, ended in zip(submits, together, strict=False):
            assert ended.finish is not None
            if ended.finish.reason == engine_pb2.FINISH_REASON_STOP:
                stopped += 1
                check_schema(small_text(ended.token_ids))
            [alone] = await run(worker, each)
            assert alone.token_ids == ended.token_ids
        assert stopped >= 20
        for each, ended in zip(plain, together[24:], strict=True):
            [alone] = await run(worker, each)
            assert alone.token_ids == ended.token_ids
        assert (await worker.load()).preemptions > 0


async def test_a_resumed_request_goes_on_as_if_it_had_not_been_moved(model: Path) -> None:
    async with running_worker(model=model) as worker:
        whole = constrained(3, Constraint(json_schema=SCHEMA))
        [undisturbed] = await run(worker, whole)
        for cut in (1, 4, len(undisturbed.token_ids) - 1):
            rest = constrained(3, Constraint(json_schema=SCHEMA))
            rest.generated_token_ids.extend(undisturbed.token_ids[:cut])
            [resumed] = await run(worker, rest)
            assert resumed.token_ids == undisturbed.token_ids[cut:]


async def test_it_begins_after_the_token_and_not_before(model: Path) -> None:
    constraint = Constraint(regex="[0-9]{3}", begin_after_token_id=END_OF_THINKING)
    async with running_worker(model=model) as worker:
        for number in range(12):
            [ended] = await run(worker, constrained(number, constraint))
            if END_OF_THINKING in ended.token_ids:
                thought = ended.token_ids.index(END_OF_THINKING)
                assert re.fullmatch("[0-9]{3}", small_text(ended.token_ids[thought + 1 :]))
            else:
                assert ended.finish is not None
                assert ended.finish.reason == engine_pb2.FINISH_REASON_STOP


async def test_min_tokens_holds_back_the_end_while_the_grammar_allows_more(model: Path) -> None:
    async with running_worker(model=model) as worker:
        for number in range(6):
            [long] = await run(worker, constrained(number, Constraint(regex="[ab]*"), min_tokens=9))
            assert len(long.token_ids) > 9 and END_OF_TEXT not in long.token_ids[:-1]
            [short] = await run(worker, constrained(number, Constraint(regex="ab"), min_tokens=9))
            assert short.token_ids == [*ids("ab"), END_OF_TEXT]


@pytest.mark.parametrize(
    ("constraint", "field", "says"),
    [
        (Constraint(), "", "is empty"),
        (Constraint(json_schema="{"), ".json_schema", "EOF while parsing"),
        (Constraint(json_schema='{"type": "objec"}'), ".json_schema", "Invalid type: objec"),
        (Constraint(json_schema="false"), ".json_schema", ""),
        (Constraint(regex="[a"), ".regex", "unclosed character class"),
        (Constraint(regex="a" * (MAX_TEXT_BYTES + 1)), ".regex", "1048577 bytes long"),
        (Constraint(lark="start: start"), ".lark", "no text matches it"),
        (Constraint(lark="start: nothing"), ".lark", "unknown name"),
        (Constraint(lark="start: <|no|>"), ".lark", "unknown special token"),
        (Constraint(regex="a", begin_after_token_id=50), ".begin_after_token_id", "is 50, allowed: 0 to 49"),
    ],
)
async def test_a_wrong_constraint_is_refused_and_nothing_is_kept(
    model: Path, constraint: Constraint, field: str, says: str
) -> None:
    async with running_worker(model=model) as worker, worker.stream() as stream:
        await stream.send(constrained(1, constraint))
        rejection = await rejection_of(stream, 1)
        assert rejection.reason == engine_pb2.REJECTION_REASON_INVALID
        assert rejection.field == f"sampling.constraint{field}"
        assert says in rejection.message
        load = await worker.load()
        assert (load.running_requests, load.waiting_requests, load.waiting_prompt_tokens) == (0, 0, 0)
        await stream.send(constrained(1, Constraint(regex="a")))
        assert (await stream.end_of(1)).token_ids == [*ids("a"), END_OF_TEXT]


async def test_a_constraint_that_becomes_too_costly_ends_the_request_alone(model: Path) -> None:
    async with running_worker(model=model) as worker:
        costly = constrained(1, Constraint(regex="((a{1000}){1000}){1000}"))
        ended, other = await run(worker, costly, constrained(2, Constraint(regex="abc")))
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_CONSTRAINT_ERROR
        assert small_text(other.token_ids) == "abc"


async def test_what_a_constraint_does_not_go_with(model: Path, tmp_path: Path) -> None:
    async with running_worker(model=model) as worker, worker.stream() as stream:
        await stream.send(constrained(1, Constraint(regex="a"), ignore_eos=True))
        assert (await rejection_of(stream, 1)).field == "sampling.ignore_eos"
        broken = constrained(2, Constraint(regex="ab"))
        broken.generated_token_ids.extend(ids("b"))
        await stream.send(broken)
        assert "does not allow the tokens generated before" in (await rejection_of(stream, 2)).message
    async with running_worker(model=tmp_path / "elsewhere") as worker, worker.stream() as stream:
        await stream.send(constrained(1, Constraint(regex="a")))
        assert "the checkpoint has no tokenizer.json" in (await rejection_of(stream, 1)).message


async def test_an_abort_while_it_is_compiled_ends_it(model: Path) -> None:
    async with running_worker(model=model) as worker, worker.stream() as stream:
        slow = "|".join(f"a{i}b" for i in range(20_000))
        await stream.send(constrained(1, Constraint(regex=slow)), aborts=[1])
        ended = await stream.end_of(1)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_ABORTED
        assert not ended.token_ids
        await worker.wait_for_load(lambda load: not load.waiting_requests and not load.running_requests)


def test_matchers_of_one_text_do_not_know_each_other(model: Path) -> None:
    compiler = ConstraintCompiler(model, 50, (END_OF_TEXT,))
    first, second = (compiler.compile(Constraint(regex="[ab]{2}c"), 0, []).result() for _ in range(2))
    assert not first.advance(ids("ab"))
    assert not second.advance(ids("b"))
    assert not first.advance(ids("abc"))
    assert second.advance(ids("bc"))


def test_a_tokeniser_is_not_asked_twice(model: Path) -> None:
    compiler = ConstraintCompiler(model, 50, (END_OF_TEXT,))
    compiler.compile(Constraint(regex="a"), 0, []).result()
    (model / "tokenizer.json").unlink()
    for number in range(40):
        compiler.compile(Constraint(regex=f"a{{{number + 1}}}"), 0, []).result()
    with pytest.raises(ConstraintError, match="unclosed"):
        compiler.compile(Constraint(regex="[a"), 0, []).result()


async def test_random_lengths_of_everything(model: Path) -> None:
    """Constrained, plain, aborted and resumed requests in any order leave nothing behind."""
    rng = Random(5)
    async with running_worker(worker_limits(num_pages=24, max_context=200), model=model) as worker:
        async with worker.stream() as stream:
            for number in range(60):
                each = submit(
                    number, [rng.randrange(40)] * rng.randint(1, 30), rng.randint(1, 60), seed=number, ignore_eos=False
                )
                if rng.random() < 0.7:
                    each.sampling.constraint.regex = f"[a-f]{{{rng.randint(0, 20)}}}(x|[0-9]+)"
                await stream.send(each, aborts=[number] if rng.random() < 0.3 else [])
            for number in range(60):
                assert (await stream.end_of(number)).finish is not None
        await worker.wait_for_load(lambda load: load.free_pages + load.cached_pages == 24)
