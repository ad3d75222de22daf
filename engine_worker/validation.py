"""From a Submit to a Request, or to the field that is wrong."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine_worker.errors import InvalidRequestError
from engine_worker.runtime.c_types import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS
from engine_worker.runtime.records import Sampling
from engine_worker.scheduler.limits import Limits
from engine_worker.scheduler.request import Request
from glmserve.engine.v1 import engine_pb2

MAX_PRIORITY = 100
MAX_BIAS = 100.0
# All of them go in one message.
MAX_PROMPT_WITH_LOGPROBS = 8192


class InvalidFieldError(InvalidRequestError):
    """`field` is the path of the offending field; the text has its value and the allowed range."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class _Range:
    """Of a float: [low, high], or (low, high] if `open_low`."""

    low: float
    high: float
    default: float
    open_low: bool = False

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"

    def has(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.open_low and value == self.low)


_FloatField = Literal["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
_FLOATS: dict[_FloatField, _Range] = {
    "temperature": _Range(0, 2, default=1),
    "top_p": _Range(0, 1, default=1, open_low=True),
    "min_p": _Range(0, 1, default=0),
    "repetition_penalty": _Range(0, 10, default=1, open_low=True),
    "frequency_penalty": _Range(-2, 2, default=0),
    "presence_penalty": _Range(-2, 2, default=0),
}


@dataclass(frozen=True, slots=True)
class Validator:
    """Checks every field of a Submit against the model and the engine's limits."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    limits: Limits

    def request(self, stream: int, submit: engine_pb2.Submit, now: float) -> Request:
        """Raises InvalidFieldError."""
        prompt_len, generated = len(submit.prompt_token_ids), len(submit.generated_token_ids)
        if not prompt_len:
            raise InvalidFieldError("prompt_token_ids", "is empty, at least 1 token is needed")
        for field in ("prompt_token_ids", "generated_token_ids"):
            self._check_tokens(field, getattr(submit, field))
        self._check_integer("priority", submit.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if submit.HasField("timeout_ms"):
            self._check_integer("timeout_ms", submit.timeout_ms, 1, 2**32 - 1)
        max_tokens = submit.sampling.max_tokens
        self._check_lengths(prompt_len, generated, submit.sampling)
        stop_ids = self._stop_ids(submit.sampling)
        if submit.sampling.HasField("constraint"):
            self._check_constraint(submit.sampling)
        if submit.sampling.HasField("prompt_logprobs"):
            self._check_prompt_logprobs(submit.sampling, prompt_len)
        return Request(
            key=(stream, submit.request_id),
            tokens=array("i", (*submit.prompt_token_ids, *submit.generated_token_ids)),
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            stop_ids=frozenset(stop_ids),
            sampling=self._sampling(submit.sampling, prompt_len, stop_ids),
            priority=submit.priority,
            arrival=now,
            age_s=submit.age_ms / 1000,
            deadline=now + submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None,
            trace_id=submit.trace_id,
            num_prompt_logprobs=submit.sampling.prompt_logprobs if submit.sampling.HasField("prompt_logprobs") else -1,
        )

    def _check_lengths(self, prompt_len: int, generated: int, sampling: engine_pb2.SamplingParams) -> None:
        field, context = "sampling.max_tokens", self.limits.max_context
        most = context - prompt_len
        if most < 1:
            raise InvalidFieldError(
                "prompt_token_ids",
                f"has {prompt_len} tokens, allowed: 1 to {context - 1} (context {context})",
            )
        self._check_integer(field, sampling.max_tokens, 1, most, f" (context {context} less the prompt)")
        if generated >= sampling.max_tokens:
            raise InvalidFieldError(
                "generated_token_ids", f"has {generated} tokens, allowed: fewer than max_tokens ({sampling.max_tokens})"
            )
        try:
            self.limits.refuse_impossible(prompt_len, sampling.max_tokens)
        except InvalidRequestError as error:
            raise InvalidFieldError(field, str(error)) from None
        self._check_integer("sampling.min_tokens", sampling.min_tokens, 0, sampling.max_tokens, " (max_tokens)")

    def _check_prompt_logprobs(self, sampling: engine_pb2.SamplingParams, prompt_len: int) -> None:
        field = "sampling.prompt_logprobs"
        self._check_integer(field, sampling.prompt_logprobs, 0, MAX_LOGPROBS)
        if prompt_len > MAX_PROMPT_WITH_LOGPROBS:
            raise InvalidFieldError(
                field, f"is set with {prompt_len} prompt tokens, allowed: at most {MAX_PROMPT_WITH_LOGPROBS} with it"
            )

    def _check_constraint(self, sampling: engine_pb2.SamplingParams) -> None:
        """What can be said before it is compiled."""
        constraint = sampling.constraint
        if not self.eos_token_ids:
            raise InvalidFieldError(
                "sampling.constraint", "is set, but the model has no end-of-generation id that could end the text"
            )
        if sampling.ignore_eos:
            raise InvalidFieldError(
                "sampling.ignore_eos", "is true, allowed: false with a constraint, which ends by such an id"
            )
        if constraint.HasField("begin_after_token_id"):
            field, token = "sampling.constraint.begin_after_token_id", constraint.begin_after_token_id
            self._check_integer(field, token, 0, self.vocab_size - 1)

    def _stop_ids(self, sampling: engine_pb2.SamplingParams) -> tuple[int, ...]:
        field = "sampling.stop_token_ids"
        self._check_tokens(field, sampling.stop_token_ids)
        model = () if sampling.ignore_eos else self.eos_token_ids
        ids = tuple(dict.fromkeys((*model, *sampling.stop_token_ids)))
        if len(ids) > MAX_STOP_IDS:
            raise InvalidFieldError(
                field,
                f"has {len(ids) - len(model)} ids beside the model's, allowed: at most {MAX_STOP_IDS - len(model)}",
            )
        return ids

    def _sampling(self, params: engine_pb2.SamplingParams, prompt_len: int, stop_ids: tuple[int, ...]) -> Sampling:
        floats = {}
        for name, allowed in _FLOATS.items():
            value = getattr(params, name) if params.HasField(name) else allowed.default
            if not allowed.has(value):
                raise InvalidFieldError(f"sampling.{name}", f"is {value:g}, allowed: {allowed}")
            floats[name] = value
        if params.HasField("logprobs"):
            self._check_integer("sampling.logprobs", params.logprobs, 0, MAX_LOGPROBS)
        return Sampling(
            **floats,
            seed=params.seed if params.HasField("seed") else secrets.randbits(64),
            top_k=min(params.top_k, self.vocab_size),
            min_tokens=0 if params.HasField("constraint") else params.min_tokens,  # then its masks see to it
            prompt_len=prompt_len,
            num_logprobs=params.logprobs if params.HasField("logprobs") else -1,
            stop_ids=stop_ids,
            logit_bias=self._logit_bias(params.logit_bias),
        )

    def _logit_bias(self, entries: Sequence[engine_pb2.LogitBias]) -> tuple[tuple[int, float], ...]:
        if len(entries) > MAX_LOGIT_BIAS:
            raise InvalidFieldError(
                "sampling.logit_bias", f"has {len(entries)} entries, allowed: at most {MAX_LOGIT_BIAS}"
            )
        seen: set[int] = set()
        for index, entry in enumerate(entries):
            path = f"sampling.logit_bias[{index}]"
            self._check_integer(f"{path}.token_id", entry.token_id, 0, self.vocab_size - 1)
            if not math.fabs(entry.bias) <= MAX_BIAS:
                raise InvalidFieldError(f"{path}.bias", f"is {entry.bias:g}, allowed: [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
            if entry.token_id in seen:
                raise InvalidFieldError(f"{path}.token_id", f"is {entry.token_id}, allowed: each token once")
            seen.add(entry.token_id)
        return tuple((entry.token_id, entry.bias) for entry in entries)

    def _check_tokens(self, field: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self.vocab_size:
            index = next(i for i, token in enumerate(ids) if token >= self.vocab_size)
            self._check_integer(f"{field}[{index}]", ids[index], 0, self.vocab_size - 1)

    @staticmethod
    def _check_integer(field: str, value: int, low: int, high: int, note: str = "") -> None:
        if not low <= value <= high:
            raise InvalidFieldError(field, f"is {value}, allowed: {low} to {high}{note}")
