"""OpenAI's sampling fields, and what asks for structure, in our terms."""

from __future__ import annotations

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.errors import echo
from router.http.fields import json_text, set_given
from router.http.schema_openai import Sampled, StructuredOutputs

_COPIED = (
    "max_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "min_tokens",
    "n",
)
# What our errors call them.
SAMPLING_NAMES = (("sampling.", ""),)
_ANY_OBJECT = '{"type": "object"}'


def sampling_options(body: Sampled) -> inference_pb2.SamplingOptions:
    """Raises InvalidArgumentError: a key of logit_bias is no token id."""
    options = inference_pb2.SamplingOptions(
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
    )
    set_given(options, **{name: getattr(body, name) for name in _COPIED})
    if body.top_k is not None:
        options.top_k = max(body.top_k, 0)
    if body.seed is not None:
        options.seed = body.seed % 2**64
    for key, bias in (body.logit_bias or {}).items():
        # Ten digits hold any id.
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= 2**32:
            raise InvalidArgumentError("logit_bias", f"{echo(key)!r} is not allowed as a key; allowed: token ids")
        options.logit_bias[int(key)] = bias
    return options


def output_constraint(
    body: Sampled, further: inference_pb2.OutputConstraint | None = None
) -> tuple[str, inference_pb2.OutputConstraint] | None:
    """The field that says what the text must match, and its meaning. `further`: what another field has said.

    Raises InvalidArgumentError: there are several.
    """
    given = [] if further is None else [("response_format", further)]
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        value = getattr(body, name)
        if value is not None:
            given.append((name, _constraint(name, name.removeprefix("guided_"), value)))
    if body.structured_outputs is not None:
        given += _structured(body.structured_outputs)
    if len(given) > 1:
        raise InvalidArgumentError(given[1][0], f"cannot be given together with {given[0][0]}")
    return given[0] if given else None


def any_object() -> inference_pb2.OutputConstraint:
    """Any JSON object."""
    return inference_pb2.OutputConstraint(json_schema=_ANY_OBJECT)


def _structured(wanted: StructuredOutputs) -> list[tuple[str, inference_pb2.OutputConstraint]]:
    given = []
    for kind, value in (
        ("json", wanted.json_),
        ("regex", wanted.regex),
        ("choice", wanted.choice),
        ("grammar", wanted.grammar),
    ):
        if value is not None:
            name = f"structured_outputs.{kind}"
            given.append((name, _constraint(name, kind, value)))
    if wanted.json_object:
        given.append(("structured_outputs.json_object", any_object()))
    return given


def _constraint(field: str, kind: str, value: str | list[str] | dict[str, object]) -> inference_pb2.OutputConstraint:
    made = inference_pb2.OutputConstraint()
    match kind, value:
        case "json", str():
            made.json_schema = value
        case "json", _:
            made.json_schema = json_text(field, value)
        case "regex", str():
            made.regex = value
        case "grammar", str():
            made.grammar = value
        case "choice", list():
            made.choices.texts.extend(value)
    return made
