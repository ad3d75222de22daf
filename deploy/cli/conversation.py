"""The turns of `glm chat`."""

import contextlib
import readline  # noqa: F401 - gives input() line editing and history
import signal
import sys
from collections.abc import Callable, Generator, Iterator

import grpc

from deploy.cli.client import InferenceClient, RequestError, request_errors
from deploy.cli.console import messages
from glmserve.inference.v1 import inference_pb2


class Conversation:
    """The messages so far. What the model said before an answer was aborted is part of them."""

    def __init__(
        self, client: InferenceClient, model: str, sampling: inference_pb2.SamplingOptions, system: str | None
    ) -> None:
        """`model` and `sampling` go into every request; `system` is the system message, if any."""
        self._client = client
        self._model = model
        self._sampling = sampling
        self._call: grpc.Call | None = None
        self._cancelled = False
        self.messages: list[inference_pb2.ChatMessage] = []
        if system is not None:
            self.messages.append(inference_pb2.ChatMessage(role=inference_pb2.ROLE_SYSTEM, content=system))

    def say(self, text: str) -> Generator[str, None, None]:
        """Send a user's turn and yield the answer as it comes. Closing the iterator cancels the request.

        RequestError: the request failed. A turn without any answer is no part of the conversation.
        """
        turn = inference_pb2.ChatMessage(role=inference_pb2.ROLE_USER, content=text)
        history = [*self.messages, turn]
        request = inference_pb2.ChatRequest(model=self._model, messages=history, sampling=self._sampling)
        answer = inference_pb2.ChatMessage(role=inference_pb2.ROLE_ASSISTANT)
        call = self._call = self._client.Chat(request)
        if self._cancelled:
            call.cancel()
        try:
            with request_errors():
                for message in call:
                    answer.content += message.content
                    yield message.content
        finally:
            call.cancel()
            self._call, self._cancelled = None, False
            if answer.content:
                self.messages += [turn, answer]

    def cancel(self) -> None:
        """End the answer that is under way or about to be: its iterator raises RequestError with the code CANCELLED."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()


def converse(conversation: Conversation) -> None:
    """Read turns from the terminal until its end. Ctrl-C gives up the line or the answer that is under way."""
    messages.print("Ctrl-C ends an answer, Ctrl-D the conversation.")
    while True:
        try:
            text = input("> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        except EOFError:
            sys.stdout.write("\n")
            return
        if text.strip():
            _answer(conversation, text)


def _answer(conversation: Conversation, text: str) -> None:
    try:
        with _interrupt_calls(conversation.cancel), contextlib.closing(conversation.say(text)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
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
