"""An InferenceService in this process that answers from a script and keeps the requests."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc

from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc

PIECES = [" Par", "is", "."]


def finish() -> inference_pb2.Finish:
    return inference_pb2.Finish(
        reason=inference_pb2.FINISH_REASON_LENGTH,
        usage=inference_pb2.Usage(prompt_tokens=5, cached_prompt_tokens=2, completion_tokens=3),
        timings=inference_pb2.Timings(queue_us=10, first_token_us=500_000, total_us=1_500_000),
    )


@dataclass
class ScriptedService(inference_pb2_grpc.InferenceServiceServicer):
    """`refusal`: the status that every call ends with instead. `interrupts`: how many chat answers get a Ctrl-C.

    `answers`: of the next chats, whole; then it is that of the script.
    """

    refusal: tuple[grpc.StatusCode, str] | None = None
    interrupts: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)
    generated: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    chatted: list[inference_pb2.ChatRequest] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    answers: list[list[inference_pb2.ChatResponse]] = field(default_factory=list)

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.generated.append(request)
        self.metadata = dict(context.invocation_metadata())
        self._refuse(context)
        for index, piece in enumerate(PIECES):
            message = inference_pb2.GenerateResponse(text=piece, token_ids=[100 + index])
            if index == 0 and request.return_prompt_ids:
                message.prompt_ids.extend([504, 3575])
            if request.sampling.HasField("logprobs"):
                top = inference_pb2.TopLogprob(token_id=7, logprob=-2.5)
                message.logprobs.add(token_id=100 + index, logprob=-0.5, top=[top])
            yield message
        yield inference_pb2.GenerateResponse(finish=finish())

    def Chat(self, request: inference_pb2.ChatRequest, context: Any) -> Iterator[inference_pb2.ChatResponse]:
        self.chatted.append(request)
        self._refuse(context)
        if self.answers:
            yield from self.answers.pop(0)
            return
        for piece in PIECES:
            yield inference_pb2.ChatResponse(content=piece)
            if self.interrupts:
                self.interrupts -= 1
                context.add_callback(self.cancelled.set)
                os.kill(os.getpid(), signal.SIGINT)
                self.cancelled.wait()
                return
        yield inference_pb2.ChatResponse(finish=finish())

    def _refuse(self, context: Any) -> None:
        if self.refusal is not None:
            context.abort(*self.refusal)


def serve(service: ScriptedService, credentials: grpc.ServerCredentials | None = None) -> tuple[grpc.Server, str]:
    """A started server, in plain text without credentials, and its address."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    listen = "127.0.0.1:0"
    port = server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    server.start()
    return server, f"127.0.0.1:{port}"
