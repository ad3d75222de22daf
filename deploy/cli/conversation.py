"""The turns of `glm chat`."""

import contextlib
import readline  # noqa: F401 - gives input() line editing and history
import sys
from collections.abc import Generator

import grpc

from deploy.cli.client import RequestError, Stub, request_errors
from deploy.cli.console import messages
from glmserve.inference.v1 import inference_pb2


class Conversation:
    """The messages so far. What the model said before an answer was aborted stays part of them."""

    def __init__(self, stub: Stub, sampling: inference_pb2.SamplingOptions, system: str | None) -> None:
        self._stub = stub
        self._sampling = sampling
        self.messages: list[inference_pb2.ChatMessage] = []
        if system is not None:
            self._add(inference_pb2.ROLE_SYSTEM, system)

    def say(self, text: str) -> Generator[str, None, None]:
        """Send a user's turn and yield the answer as it comes. Closing the iterator cancels the request.

        RequestError: the request failed. A turn without any answer is taken back.
        """
        self._add(inference_pb2.ROLE_USER, text)
        request = inference_pb2.ChatRequest(messages=self.messages, sampling=self._sampling)
        call, answer = self._stub.Chat(request), ""
        try:
            with request_errors():
                for message in call:
                    answer += message.content
                    yield message.content
        finally:
            assert isinstance(call, grpc.Call)
            call.cancel()
            if answer:
                self._add(inference_pb2.ROLE_ASSISTANT, answer)
            else:
                self.messages.pop()

    def _add(self, role: inference_pb2.Role.ValueType, content: str) -> None:
        self.messages.append(inference_pb2.ChatMessage(role=role, content=content))


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
        with contextlib.closing(conversation.say(text)) as pieces:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")
    except KeyboardInterrupt:
        messages.print("\n(stopped)")
    except RequestError as error:
        messages.print(f"error: {error}", markup=False)
