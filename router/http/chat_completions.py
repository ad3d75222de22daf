"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import JSONResponse, Response

from glmserve.inference.v1 import inference_pb2
from router.http.answer import ChatAnswer, ChatChoice
from router.http.call import HttpCall
from router.http.chat_request import chat_request
from router.http.errors import Failure
from router.http.openai_parts import FINISH_REASONS, Envelope, UsageSum, chat_logprobs
from router.http.schema_openai import ChatCompletionRequest
from router.http.sse import DONE, EventStream, begun, data_event
from router.inference import InferenceCore

_PREFIX = "chatcmpl-"


async def chat_completion(
    core: InferenceCore, body: ChatCompletionRequest, call: HttpCall, interval_s: float
) -> Response:
    """The answer, or the stream of its pieces."""
    call.limit_time("timeout", body.timeout)
    request, call.names = chat_request(body)
    model = await core.get_model(inference_pb2.GetModelRequest(model=body.model))
    responses = core.chat(request, call)
    if body.stream:
        events = _events(await begun(responses), body, Envelope("chat.completion.chunk", _PREFIX, model))
        return EventStream(events, openai_error_event, call.names, interval_s, call.response_headers)
    answer = await ChatAnswer.of(responses)
    whole = _whole(answer, body, Envelope("chat.completion", _PREFIX, model))
    return JSONResponse(whole, headers=call.response_headers)


def openai_error_event(failure: Failure) -> bytes:
    """The last event of a stream that failed; the clients raise it."""
    return data_event(failure.openai)


def _whole(answer: ChatAnswer, body: ChatCompletionRequest, envelope: Envelope) -> dict[str, Any]:
    usage = UsageSum()
    choices = []
    for index, choice in enumerate(answer.choices):
        usage.add(0, choice.finish.usage)
        choices.append(
            {
                "index": index,
                "message": _message(choice),
                "logprobs": chat_logprobs(choice.logprobs) if body.logprobs else None,
                "finish_reason": FINISH_REASONS[choice.finish.reason],
                **({"token_ids": choice.token_ids} if body.return_token_ids else {}),
            }
        )
    more = {"prompt_token_ids": answer.prompt_ids} if body.return_token_ids else {}
    return envelope.around(answer.request_id, choices, usage=usage.json, **more)


def _message(choice: ChatChoice) -> dict[str, Any]:
    calls = choice.calls
    message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in calls
        ]
    return message


async def _events(
    responses: AsyncIterator[inference_pb2.ChatResponse], body: ChatCompletionRequest, envelope: Envelope
) -> AsyncIterator[bytes]:
    chunks = _Chunks(body, envelope)
    async for response in responses:
        yield chunks.of(response)
    yield chunks.end()


class _Chunks:
    """Messages to chunks: the role first in each choice, the finish reason last, alone."""

    def __init__(self, body: ChatCompletionRequest, envelope: Envelope) -> None:
        self._envelope = envelope
        self._logprobs = bool(body.logprobs)
        self._token_ids = bool(body.return_token_ids)
        self._with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        # Null in every chunk but the last, where usage is asked for.
        self._no_usage = {"usage": None} if self._with_usage else {}
        self._usage = UsageSum()
        self._begun: set[int] = set()
        self._request_id = ""

    def of(self, response: inference_pb2.ChatResponse) -> bytes:
        """The chunks of one message."""
        self._request_id = response.request_id
        events = []
        if response.choice not in self._begun:
            self._begun.add(response.choice)
            more: dict[str, Any] = {"prompt_token_ids": list(response.prompt_ids)} if response.prompt_ids else {}
            events.append(self._chunk(response.choice, {"role": "assistant", "content": ""}, **more))
        delta = _delta(response)
        if delta or response.logprobs or (self._token_ids and response.token_ids):
            events.append(self._chunk(response.choice, delta, response))
        if response.HasField("finish"):
            self._usage.add(0, response.finish.usage)
            events.append(self._chunk(response.choice, {}, reason=FINISH_REASONS[response.finish.reason]))
        return b"".join(events)

    def end(self) -> bytes:
        """After the last message."""
        if not self._with_usage:
            return DONE
        return data_event(self._envelope.around(self._request_id, [], usage=self._usage.json)) + DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        response: inference_pb2.ChatResponse | None = None,
        reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        if response is not None and self._logprobs:
            choice["logprobs"] = chat_logprobs(response.logprobs)
        if response is not None and self._token_ids:
            choice["token_ids"] = list(response.token_ids)
        return data_event(self._envelope.around(self._request_id, [choice], **self._no_usage, **more))


def _delta(response: inference_pb2.ChatResponse) -> dict[str, Any]:
    delta: dict[str, Any] = {}
    if response.reasoning:
        delta["reasoning_content"] = response.reasoning
    if response.content:
        delta["content"] = response.content
    if response.tool_calls:
        delta["tool_calls"] = [_call_delta(call) for call in response.tool_calls]
    return delta


def _call_delta(call: inference_pb2.ToolCallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments_json}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments_json},
    }
