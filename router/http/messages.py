"""POST /v1/messages: Anthropic's Messages API."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.responses import JSONResponse, Response

from glmserve.inference.v1 import inference_pb2
from router.http.answer import ChatAnswer
from router.http.call import HttpCall
from router.http.errors import Failure
from router.http.message_events import MessageEvents
from router.http.message_parts import message_id, signature, stop_of, usage_json
from router.http.message_request import message_request
from router.http.schema_anthropic import MessageRequest
from router.http.sse import EventStream, begun, named_event
from router.inference import InferenceCore


async def create_message(core: InferenceCore, body: MessageRequest, call: HttpCall, interval_s: float) -> Response:
    """The message, or the stream of its events."""
    call.limit_time("timeout", body.timeout)
    request, call.names = message_request(body)
    model = await core.get_model(inference_pb2.GetModelRequest(model=body.model))
    responses = core.chat(request, call)
    if body.stream:
        events = _events(await begun(responses), MessageEvents(model.name))
        return EventStream(events, _error_event, call.names, interval_s, _headers(call))
    return JSONResponse(whole_message(await ChatAnswer.of(responses), model.name), headers=_headers(call))


def _headers(call: HttpCall) -> dict[str, str]:
    return {**call.response_headers, "request-id": call.request_id or ""}


async def _events(responses: AsyncIterator[inference_pb2.ChatResponse], events: MessageEvents) -> AsyncIterator[bytes]:
    async for response in responses:
        yield events.of(response)


def _error_event(failure: Failure) -> bytes:
    return named_event("error", failure.anthropic(None))


def whole_message(answer: ChatAnswer, model: str) -> dict[str, Any]:
    """All of an answer as one message."""
    [choice] = answer.choices
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature(answer.request_id)})
    if choice.content:
        content.append({"type": "text", "text": choice.content})
    for call in choice.calls:
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments_json)})
    return {
        "id": message_id(answer.request_id),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **stop_of(choice.finish),
        "usage": usage_json(choice.finish.usage),
    }


def _input(arguments: str) -> Any:
    """A call that max_tokens cut short has no whole object, nor has one with NaN: they cannot be shown in this form."""
    try:
        return json.loads(arguments or "{}", parse_constant=_refuse_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return {}


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse_number(text)
    return value
