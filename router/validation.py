"""Every limit of the public request, and the step from public sampling options to the worker's parameters.

Every refusal is an InvalidArgumentError that names the field, the value and what is allowed.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 300
MAX_CHOICES = 16
# A message of 4 MiB has room for millions of either: seconds of work, for which everybody would wait.
MAX_MESSAGES = 2048
MAX_DETOKENIZE_IDS = 1 << 18
_UINT32_MAX = 2**32 - 1


@dataclass(frozen=True)
class Bounds:
    """A closed interval, or one open at its low end."""

    low: float
    high: float
    low_open: bool = False

    def allow(self, value: float) -> bool:
        """False for NaN too."""
        return (self.low < value if self.low_open else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"above {self.low:g}, at most {self.high:g}" if self.low_open else f"{self.low:.10g} to {self.high:.10g}"


SAMPLING_BOUNDS: Mapping[str, Bounds] = {
    "temperature": Bounds(0, 2),
    "top_p": Bounds(0, 1, low_open=True),
    "top_k": Bounds(0, _UINT32_MAX),
    "min_p": Bounds(0, 1),
    "repetition_penalty": Bounds(0, 10, low_open=True),
    "frequency_penalty": Bounds(-2, 2),
    "presence_penalty": Bounds(-2, 2),
    "logprobs": Bounds(0, 20),
    "prompt_logprobs": Bounds(0, 20),
    "n": Bounds(1, MAX_CHOICES),
    "best_of": Bounds(1, MAX_CHOICES),
    "max_tokens": Bounds(1, _UINT32_MAX),
}
# Of one choice, as the worker has it under the same name.
_COPIED = tuple(name for name in SAMPLING_BOUNDS if name not in ("max_tokens", "n", "best_of"))
_LOGIT_BIAS_BOUNDS = Bounds(-100, 100)
_PRIORITY_BOUNDS = Bounds(-100, 100)


@dataclass(frozen=True)
class ModelLimits:
    """Tokens of prompt and completion together; rows of the embedding."""

    max_context: int
    vocab_size: int


def check_priority(priority: int) -> None:
    """-100 to 100."""
    _check("priority", priority, _PRIORITY_BOUNDS)


@dataclass(frozen=True, slots=True)
class NumChoices:
    """Of one prompt: how many the client gets, and how many of which those are the best."""

    sent: int
    generated: int


def num_choices(options: inference_pb2.SamplingOptions) -> NumChoices:
    """1 to 16 of each, and no more sent than generated."""
    for name in ("n", "best_of"):
        if options.HasField(name):
            _check(f"sampling.{name}", getattr(options, name), SAMPLING_BOUNDS[name])
    sent = options.n if options.HasField("n") else 1
    generated = options.best_of if options.HasField("best_of") else sent
    if generated < sent:
        raise InvalidArgumentError(
            "sampling.best_of", f"{generated} is not allowed; allowed: n = {sent} to {MAX_CHOICES}"
        )
    return NumChoices(sent, generated)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Every id is in the model's vocabulary."""
    if ids and max(ids) >= vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
        raise InvalidArgumentError(
            f"{field}[{index}]", f"unknown token id {ids[index]}; allowed: 0 to {vocab_size - 1}"
        )


def check_prompt(field: str, ids: Sequence[int], limits: ModelLimits) -> None:
    """At least one token, and room for one more in the context."""
    if not ids:
        raise InvalidArgumentError(field, "empty; at least one token is needed")
    if len(ids) >= limits.max_context:
        raise InvalidArgumentError(
            field,
            f"{len(ids)} tokens leave no room in the context of {limits.max_context}; "
            f"allowed: 1 to {limits.max_context - 1} tokens",
        )


def check_sampling(options: inference_pb2.SamplingOptions, vocab_size: int) -> None:
    """Everything that can be checked before the prompt's length is known."""
    for name, bounds in SAMPLING_BOUNDS.items():
        if options.HasField(name):  # type: ignore[arg-type]
            _check(f"sampling.{name}", getattr(options, name), bounds)
    check_count("sampling.stop", len(options.stop), MAX_STOP_STRINGS)
    for index, stop in enumerate(options.stop):
        size = len(stop.encode())
        if not 1 <= size <= MAX_STOP_STRING_BYTES:
            raise InvalidArgumentError(
                f"sampling.stop[{index}]", f"{size} bytes long; allowed: 1 to {MAX_STOP_STRING_BYTES} bytes"
            )
    check_count("sampling.stop_token_ids", len(options.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("sampling.stop_token_ids", options.stop_token_ids, vocab_size)
    check_count("sampling.logit_bias", len(options.logit_bias), MAX_LOGIT_BIAS)
    for token_id, bias in options.logit_bias.items():
        if token_id >= vocab_size:
            raise InvalidArgumentError(
                "sampling.logit_bias", f"unknown token id {token_id}; allowed: 0 to {vocab_size - 1}"
            )
        _check(f"sampling.logit_bias[{token_id}]", bias, _LOGIT_BIAS_BOUNDS)


def engine_sampling(
    options: inference_pb2.SamplingOptions, defaults: Mapping[str, float], prompt_tokens: int, limits: ModelLimits
) -> engine_pb2.SamplingParams:
    """The worker's parameters for checked `options`. The seed is always set, so that a request can be repeated."""
    params = engine_pb2.SamplingParams(
        max_tokens=_max_tokens(options, defaults, prompt_tokens, limits),
        seed=options.seed if options.HasField("seed") else secrets.randbits(64),
        min_tokens=options.min_tokens,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )
    for name in _COPIED:
        if options.HasField(name):  # type: ignore[arg-type]
            setattr(params, name, getattr(options, name))
        elif name in defaults:
            setattr(params, name, defaults[name])
    for token_id, bias in sorted(options.logit_bias.items()):
        params.logit_bias.add(token_id=token_id, bias=bias)
    if params.min_tokens > params.max_tokens:
        raise InvalidArgumentError(
            "sampling.min_tokens", f"{params.min_tokens} is not allowed; allowed: 0 to max_tokens = {params.max_tokens}"
        )
    return params


def _max_tokens(
    options: inference_pb2.SamplingOptions, defaults: Mapping[str, float], prompt_tokens: int, limits: ModelLimits
) -> int:
    room = limits.max_context - prompt_tokens
    if not options.HasField("max_tokens"):
        return min(int(defaults.get("max_tokens", room)), room)
    if options.max_tokens > room:
        raise InvalidArgumentError(
            "sampling.max_tokens",
            f"{options.max_tokens} with {prompt_tokens} prompt tokens is over the context of {limits.max_context}; "
            f"allowed: 1 to {room}",
        )
    return options.max_tokens


def _check(field: str, value: float, bounds: Bounds) -> None:
    if not bounds.allow(value):
        # Seven digits: the client's float is a single.
        given = f"{value:.7g}" if isinstance(value, float) else str(value)
        raise InvalidArgumentError(field, f"{given} is not allowed; allowed: {bounds}")


def check_count(field: str, count: int, maximum: int) -> None:
    if count > maximum:
        raise InvalidArgumentError(field, f"{count} entries; allowed: 0 to {maximum}")
