"""The turns of `glm chat`."""

import contextlib
import readline  # noqa: F401 - gives input() line editing and history
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence

import grpc

from deploy.cli.client import InferenceClient, RequestError, request_errors
from deploy.cli.console import messages
from glmserve.inference.v1 import inference_pb2


class Conversation:
    """The messages so far. What the model said before an answer was aborted is part of them."""

    def __init__(self, client: InferenceClient, request: inference_pb2.ChatRequest, system: str | None) -> None:
        """`request`: what every request has beside its messages. `system` is the system message, if any."""
        self._client = client
        self._request = request
        self._call: grpc.Call | None = None
        self._cancelled = False
        self.messages: list[inference_pb2.ChatMessage] = []
        if system is not None:
            self.messages.append(inference_pb2.ChatMessage(role=inference_pb2.ROLE_SYSTEM, content=system))

    @property
    def pending(self) -> Sequence[inference_pb2.ToolCall]:
        """The tool calls that the last answer waits for."""
        return self.messages[-1].tool_calls if self.messages else ()

    def say(self, text: str) -> Generator[inference_pb2.ChatResponse, None, None]:
        """Send a user's turn and yield the answer as it comes. Closing the iterator cancels the request.

        RequestError: the request failed. A turn without any answer is no part of the conversation.
        """
        return self._answer_to([inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=text)])

    def give(self, results: Sequence[str]) -> Generator[inference_pb2.ChatResponse, None, None]:
        """Send the results of the `pending` calls, in their order; otherwise as `say`."""
        role = inference_pb2.ROLE_TOOL
        return self._answer_to(
            [
                inference_pb2.ChatMessage(role=role, content=result, tool_call_id=call.id)
                for call, result in zip(self.pending, results, strict=True)
            ]
        )

    def cancel(self) -> None:
        """End the answer that is under way or about to be: its iterator raises RequestError with the code CANCELLED."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    def _answer_to(
        self, turns: Sequence[inference_pb2.ChatMessage]
    ) -> Generator[inference_pb2.ChatResponse, None, None]:
        request = inference_pb2.ChatRequest()
        request.CopyFrom(self._request)
        request.messages.extend([*self.messages, *turns])
        answer = inference_pb2.ChatMessage(role=inference_pb2.ROLE_ASSISTANT)
        calls: list[inference_pb2.ToolCall] = []
        call = self._call = self._client.Chat(request)
        if self._cancelled:
            call.cancel()
        try:
            with request_errors():
                for message in call:
                    answer.content += message.content
                    answer.reasoning += message.reasoning
                    for piece in message.tool_calls:
                        _add(calls, piece)
                    if message.finish.reason == inference_pb2.FINISH_REASON_TOOL_CALLS:  # they are whole
                        answer.tool_calls.extend(calls)
                    yield message
        finally:
            call.cancel()
            self._call, self._cancelled = None, False
            if answer.content or answer.tool_calls:
                self.messages += [*turns, answer]


def _add(calls: list[inference_pb2.ToolCall], piece: inference_pb2.ToolCallDelta) -> None:
    if piece.id:
        calls.append(inference_pb2.ToolCall(id=piece.id, name=piece.name))
    calls[piece.index].arguments_json += piece.arguments_json


def converse(conversation: Conversation) -> None:
    """Read turns from the terminal until its end. Ctrl-C gives up the line or the answer that is under way.

    The results of tool calls are read from the terminal too, one line each.
    """
    messages.print("Ctrl-C ends an answer, Ctrl-D the conversation.")
    with contextlib.suppress(EOFError):
        while True:
            with _line_given_up():
                text = input("> ")
                if text.strip():
                    _show(conversation, conversation.say(text))
                while conversation.pending:
                    results = [input(f"{call.name}({call.arguments_json}) = ") for call in conversation.pending]
                    _show(conversation, conversation.give(results))
    sys.stdout.write("\n")


@contextlib.contextmanager
def _line_given_up() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.stdout.write("\n")


def _show(conversation: Conversation, answer: Generator[inference_pb2.ChatResponse, None, None]) -> None:
    """Content to stdout; reasoning, dimmed, to stderr."""
    thinking = False
    try:
        with _interrupt_calls(conversation.cancel), contextlib.closing(answer) as pieces:
            for piece in pieces:
                if piece.reasoning:
                    messages.print(piece.reasoning, style="dim", end="", markup=False)
                    thinking = True
                if thinking and (piece.content or piece.tool_calls or piece.HasField("finish")):
                    messages.print()
                    thinking = False
                sys.stdout.write(piece.content)
                sys.stdout.flush()
        sys.stdout.write("\n")
    except RequestError as error:
        stopped = error.code is grpc.StatusCode.CANCELLED
        messages.print("\n(stopped)" if stopped else f"error: {error}", markup=False)


@contextlib.contextmanager
def _interrupt_calls(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C cancels: a KeyboardInterrupt could come in the middle of gRPC's own bookkeeping."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
