"""Every field of a Submit: what is refused names the field, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine_worker.validation import InvalidFieldError, Validator
from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from router.validation import ModelLimits, check_sampling, engine_sampling
from tests.unit.router_harness import MAX_CONTEXT, VOCAB_SIZE, encode
from tests.unit.test_router_validation import ALLOWED, LAST_ID
from tests.unit.worker_harness import worker_limits

NAN = float("nan")
INF = float("inf")


def validator(num_pages: int = 64, eos: tuple[int, ...] = (49,)) -> Validator:
    return Validator(50, eos, worker_limits(num_pages=num_pages, max_context=256))


def good() -> engine_pb2.Submit:
    return engine_pb2.Submit(request_id=1, prompt_token_ids=[1, 2, 3], sampling=engine_pb2.SamplingParams(max_tokens=8))


def sampling(**fields: object) -> engine_pb2.Submit:
    submit = good()
    submit.sampling.MergeFrom(engine_pb2.SamplingParams(**fields))  # type: ignore[arg-type]
    return submit


def changed(change: Callable[[engine_pb2.Submit], None]) -> engine_pb2.Submit:
    submit = good()
    change(submit)
    return submit


BIAS = engine_pb2.LogitBias

REFUSED = [
    (changed(lambda s: s.ClearField("prompt_token_ids")), "prompt_token_ids", "is empty, at least 1 token is needed"),
    (changed(lambda s: s.prompt_token_ids.append(50)), "prompt_token_ids[3]", "is 50, allowed: 0 to 49"),
    (changed(lambda s: s.prompt_token_ids.append(2**32 - 1)), "prompt_token_ids[3]", "is 4294967295, allowed: 0 to 49"),
    (
        changed(lambda s: s.prompt_token_ids.extend([0] * 253)),
        "prompt_token_ids",
        "has 256 tokens, allowed: 1 to 255 (context 256)",
    ),
    (changed(lambda s: s.generated_token_ids.append(77)), "generated_token_ids[0]", "is 77, allowed: 0 to 49"),
    (
        changed(lambda s: s.generated_token_ids.extend([0] * 8)),
        "generated_token_ids",
        "has 8 tokens, allowed: fewer than max_tokens (8)",
    ),
    (changed(lambda s: setattr(s, "priority", 101)), "priority", "is 101, allowed: -100 to 100"),
    (changed(lambda s: setattr(s, "priority", -101)), "priority", "is -101, allowed: -100 to 100"),
    (changed(lambda s: setattr(s, "timeout_ms", 0)), "timeout_ms", "is 0, allowed: 1 to 4294967295"),
    (
        changed(lambda s: s.ClearField("sampling")),
        "sampling.max_tokens",
        "is 0, allowed: 1 to 253 (context 256 less the prompt)",
    ),
    (sampling(max_tokens=254), "sampling.max_tokens", "is 254, allowed: 1 to 253 (context 256 less the prompt)"),
    (sampling(temperature=-0.5), "sampling.temperature", "is -0.5, allowed: [0, 2]"),
    (sampling(temperature=2.5), "sampling.temperature", "is 2.5, allowed: [0, 2]"),
    (sampling(temperature=NAN), "sampling.temperature", "is nan, allowed: [0, 2]"),
    (sampling(temperature=INF), "sampling.temperature", "is inf, allowed: [0, 2]"),
    (sampling(top_p=0.0), "sampling.top_p", "is 0, allowed: (0, 1]"),
    (sampling(top_p=1.5), "sampling.top_p", "is 1.5, allowed: (0, 1]"),
    (sampling(top_p=NAN), "sampling.top_p", "is nan, allowed: (0, 1]"),
    (sampling(min_p=-1.0), "sampling.min_p", "is -1, allowed: [0, 1]"),
    (sampling(min_p=NAN), "sampling.min_p", "is nan, allowed: [0, 1]"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty", "is 0, allowed: (0, 10]"),
    (sampling(repetition_penalty=NAN), "sampling.repetition_penalty", "is nan, allowed: (0, 10]"),
    (sampling(frequency_penalty=-3.0), "sampling.frequency_penalty", "is -3, allowed: [-2, 2]"),
    (sampling(presence_penalty=-INF), "sampling.presence_penalty", "is -inf, allowed: [-2, 2]"),
    (sampling(min_tokens=9), "sampling.min_tokens", "is 9, allowed: 0 to 8 (max_tokens)"),
    (sampling(stop_token_ids=[3, 50]), "sampling.stop_token_ids[1]", "is 50, allowed: 0 to 49"),
    (sampling(logprobs=21), "sampling.logprobs", "is 21, allowed: 0 to 20"),
    (sampling(prompt_logprobs=21), "sampling.prompt_logprobs", "is 21, allowed: 0 to 20"),
    (sampling(logit_bias=[BIAS(token_id=50)]), "sampling.logit_bias[0].token_id", "is 50, allowed: 0 to 49"),
    (sampling(logit_bias=[BIAS(bias=-101.0)]), "sampling.logit_bias[0].bias", "is -101, allowed: [-100, 100]"),
    (sampling(logit_bias=[BIAS(bias=NAN)]), "sampling.logit_bias[0].bias", "is nan, allowed: [-100, 100]"),
    (
        sampling(logit_bias=[BIAS(token_id=4), BIAS(token_id=4)]),
        "sampling.logit_bias[1].token_id",
        "is 4, allowed: each token once",
    ),
    (sampling(logit_bias=[BIAS()] * 301), "sampling.logit_bias", "has 301 entries, allowed: at most 300"),
]


@pytest.mark.parametrize(
    ("submit", "field", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_refusals(submit: engine_pb2.Submit, field: str, message: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        validator().request(1, submit, 0.0)
    assert (caught.value.field, str(caught.value)) == (field, message)


def test_stop_lists_hold_64_ids_with_the_models_own() -> None:
    many = Validator(200, (199, 198), worker_limits())
    assert len(many.request(1, sampling(stop_token_ids=range(62)), 0.0).stop_ids) == 64
    with pytest.raises(InvalidFieldError, match="has 63 ids beside the model's, allowed: at most 62"):
        many.request(1, sampling(stop_token_ids=range(63)), 0.0)
    assert len(many.request(1, sampling(stop_token_ids=range(64), ignore_eos=True), 0.0).stop_ids) == 64


def test_a_request_beyond_the_pool_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="need 3 KV pages, at most 2 are allowed") as caught:
        validator(num_pages=2).request(1, sampling(max_tokens=31), 0.0)
    assert caught.value.field == "sampling.max_tokens"
    validator(num_pages=2).request(1, sampling(max_tokens=30), 0.0)


def test_unset_fields_mean_what_the_contract_says() -> None:
    request = validator().request(4, good(), 10.0)
    got = request.sampling
    assert request.key == (4, 1)
    assert (request.arrival, request.deadline, request.priority) == (10.0, None, 0)
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (1.0, 1.0, 0, 0.0)
    assert (got.repetition_penalty, got.frequency_penalty, got.presence_penalty) == (1.0, 0.0, 0.0)
    assert (got.num_logprobs, got.min_tokens, got.prompt_len, got.stop_ids) == (-1, 0, 3, (49,))
    assert request.stop_ids == {49}


@pytest.mark.parametrize("options", ALLOWED, ids=",".join)
def test_what_the_router_lets_through_is_taken(options: dict[str, Any]) -> None:
    prompt = encode("hi")
    public = inference_pb2.SamplingOptions(**options)
    check_sampling(public, VOCAB_SIZE)
    params = engine_sampling(public, {}, len(prompt), ModelLimits(MAX_CONTEXT, VOCAB_SIZE))
    submit = engine_pb2.Submit(request_id=1, prompt_token_ids=prompt, sampling=params)
    worker = Validator(VOCAB_SIZE, (LAST_ID,), worker_limits(num_pages=64, max_context=MAX_CONTEXT))
    assert worker.request(1, submit, 0.0).sampling.top_k <= VOCAB_SIZE


def test_set_fields_arrive() -> None:
    submit = sampling(
        temperature=0.0, top_p=0.5, top_k=1000, min_p=0.1, repetition_penalty=1.5, frequency_penalty=-2.0,
        presence_penalty=2.0, seed=2**64 - 1, min_tokens=8, stop_token_ids=[3, 3, 49], ignore_eos=True, logprobs=0,
        logit_bias=[BIAS(token_id=1, bias=100.0), BIAS(token_id=2, bias=-100.0)],
    )  # fmt: skip
    submit.timeout_ms, submit.priority, submit.trace_id = 1500, -100, "abc"
    submit.generated_token_ids.extend([7, 8])
    request = validator().request(1, submit, 10.0)
    got = request.sampling
    assert list(request.tokens) == [1, 2, 3, 7, 8]
    assert (request.prompt_len, request.deadline, request.priority, request.trace_id) == (3, 11.5, -100, "abc")
    assert (got.temperature, got.top_p, got.top_k, got.seed) == (0.0, 0.5, 50, 2**64 - 1)
    assert (got.num_logprobs, got.min_tokens, got.stop_ids) == (0, 8, (3, 49))
    assert got.logit_bias == ((1, 100.0), (2, -100.0))
