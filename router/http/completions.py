"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.http.call import HttpCall
from router.http.chat_completions import openai_error_event
from router.http.completion_logprobs import CompletionLogprobs
from router.http.errors import Names
from router.http.merge import merged
from router.http.openai_parts import FINISH_REASONS, Envelope, UsageSum
from router.http.openai_sampling import SAMPLING_NAMES, output_constraint, sampling_options
from router.http.schema_openai import MAX_PROMPTS, CompletionRequest
from router.http.sse import DONE, EventStream, begun, data_event
from router.inference import InferenceCore

_PREFIX = "cmpl-"
_NAMES = (("sampling.prompt_logprobs", "logprobs"), *SAMPLING_NAMES, ("prompt_ids.ids", "prompt"))
# OpenAI's own default; ours, what is left of the context, would surprise who relies on it.
_DEFAULT_MAX_TOKENS = 16


async def completion(core: InferenceCore, body: CompletionRequest, call: HttpCall, interval_s: float) -> Response:
    """The texts, or the stream of their pieces."""
    call.limit_time("timeout", body.timeout)
    requests, call.names = completion_requests(body)
    model = await core.get_model(inference_pb2.GetModelRequest(model=body.model))
    envelope = Envelope("text_completion", _PREFIX, model)
    responses = _responses(core, requests, call)
    if body.stream:
        events = _events(await begun(responses), body, envelope)
        return EventStream(events, openai_error_event, call.names, interval_s, call.response_headers)
    return JSONResponse(await _whole(responses, body, envelope), headers=call.response_headers)


def completion_requests(body: CompletionRequest) -> tuple[list[inference_pb2.GenerateRequest], Names]:
    """A request for each prompt, and what their client calls our fields. Raises InvalidArgumentError."""
    sampling = sampling_options(body)
    if body.max_tokens is None:
        sampling.max_tokens = _DEFAULT_MAX_TOKENS
    if body.best_of is not None:
        if body.stream and body.best_of != (body.n or 1):
            raise InvalidArgumentError("best_of", "cannot be streamed; set stream: false, or best_of to n")
        sampling.best_of = body.best_of
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
        if body.echo:
            sampling.prompt_logprobs = body.logprobs
    names: tuple[tuple[str, str], ...] = _NAMES
    template = inference_pb2.GenerateRequest(
        model=body.model,
        sampling=sampling,
        priority=body.priority,
        echo=bool(body.echo),
        suffix=body.suffix or "",
        return_prompt_ids=bool(body.return_token_ids),
    )
    constraint = output_constraint(body)
    if constraint is not None:
        name, meaning = constraint
        template.constraint.CopyFrom(meaning)
        names = ((f"constraint.{meaning.WhichOneof('kind')}", name), ("constraint", name), *_NAMES)
    return [_with_prompt(template, prompt) for prompt in _prompts(body)], Names(names)


def _prompts(body: CompletionRequest) -> list[str | Sequence[int]]:
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidArgumentError("prompt", "empty; at least one prompt is needed")
    if isinstance(given[0], int):
        return [given]
    if len(given) > MAX_PROMPTS:
        raise InvalidArgumentError("prompt", f"{len(given)} prompts; allowed: 1 to {MAX_PROMPTS}")
    return list(given)


def _with_prompt(template: inference_pb2.GenerateRequest, prompt: str | Sequence[int]) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.CopyFrom(template)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.prompt_ids.ids.extend(prompt)
    return request


@dataclass(frozen=True, slots=True)
class _Piece:
    prompt: int
    index: int
    response: inference_pb2.GenerateResponse


async def _responses(
    core: InferenceCore, requests: Sequence[inference_pb2.GenerateRequest], call: HttpCall
) -> AsyncIterator[_Piece]:
    """Of all prompts at once, each by a call of its own."""
    if len(requests) == 1:
        async for response in core.generate(requests[0], call):
            yield _Piece(0, response.choice, response)
        return
    parts = [call.part(number) for number in range(len(requests))]
    choices = requests[0].sampling.n or 1
    streams = [core.generate(request, part) for request, part in zip(requests, parts, strict=True)]
    async for number, response in merged(streams, [part.end for part in parts]):
        yield _Piece(number, number * choices + response.choice, response)


class _Choice:
    """One text, added up."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_ids: list[int] = []
        self._logprobs = CompletionLogprobs()
        self._reason: str | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        self._text.append(response.text)
        self._token_ids.extend(response.token_ids)
        self._prompt_ids.extend(response.prompt_ids)
        self._logprobs.add(response)
        if response.HasField("finish"):
            self._reason = FINISH_REASONS[response.finish.reason]

    def json(self, index: int, body: CompletionRequest) -> dict[str, Any]:
        logprobs = None if body.logprobs is None else self._logprobs.json
        ids = {"token_ids": self._token_ids, "prompt_token_ids": self._prompt_ids} if body.return_token_ids else {}
        text = "".join(self._text)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self._reason, **ids}


async def _whole(responses: AsyncIterator[_Piece], body: CompletionRequest, envelope: Envelope) -> dict[str, Any]:
    usage, request_id = UsageSum(), ""
    choices: dict[int, _Choice] = {}
    async for piece in responses:
        request_id = request_id or piece.response.request_id
        choices.setdefault(piece.index, _Choice()).add(piece.response)
        if piece.response.HasField("finish"):
            usage.add(piece.prompt, piece.response.finish.usage)
    made = [choices[index].json(index, body) for index in sorted(choices)]
    return envelope.around(request_id, made, usage=usage.json)


async def _events(
    responses: AsyncIterator[_Piece], body: CompletionRequest, envelope: Envelope
) -> AsyncIterator[bytes]:
    with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    usage, request_id = UsageSum(), ""
    logprobs: dict[int, CompletionLogprobs] = {}
    no_usage = {"usage": None} if with_usage else {}
    async for piece in responses:
        response = piece.response
        request_id = request_id or response.request_id
        choice: dict[str, Any] = {"index": piece.index, "text": response.text, "logprobs": None, "finish_reason": None}
        if body.logprobs is not None:
            choice["logprobs"] = logprobs.setdefault(piece.index, CompletionLogprobs()).add(response)
        if body.return_token_ids:
            choice |= {"token_ids": list(response.token_ids), "prompt_token_ids": list(response.prompt_ids)}
        if response.HasField("finish"):
            usage.add(piece.prompt, response.finish.usage)
            choice["finish_reason"] = FINISH_REASONS[response.finish.reason]
        yield data_event(envelope.around(request_id, [choice], **no_usage))
    yield (data_event(envelope.around(request_id, [], usage=usage.json)) if with_usage else b"") + DONE
