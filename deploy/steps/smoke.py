"""One short prompt through worker and router: the answer has to make sense."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from deploy.errors import DeployError
from deploy.local import LocalOptions, local_cluster
from deploy.models.progress import Progress, silent
from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc

PROMPT = "The capital of France is"
EXPECTED = "Paris"


class SmokeError(DeployError):
    """The model answered, and the answer is wrong."""


def smoke(
    directory: Path,
    worker_args: Sequence[str] = (),
    prompt: str = PROMPT,
    expected: str = EXPECTED,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Start a pair, continue `prompt` greedily. Returns text and times. SmokeError: `expected` is not in the text."""
    begun = time.perf_counter()
    options = LocalOptions(directory, worker_args=worker_args, start_seconds=3600.0)
    with local_cluster(options, lambda state: progress(state, 0, 0)) as cluster:
        started_s = time.perf_counter() - begun
        with grpc.insecure_channel(cluster.router) as channel:
            text, finish = _answer(inference_pb2_grpc.InferenceServiceStub(channel), prompt)
    if expected not in text:
        raise SmokeError(f"{prompt!r} was continued with {text!r}, which lacks {expected!r}: the model does not work")
    return {
        "prompt": prompt,
        "text": text,
        "start_s": round(started_s, 2),
        "first_token_ms": finish.timings.first_token_us / 1000,
        "completion_tokens": finish.usage.completion_tokens,
    }


def _answer(client: inference_pb2_grpc.InferenceServiceStub, prompt: str) -> tuple[str, inference_pb2.Finish]:
    sampling = inference_pb2.SamplingOptions(temperature=0.0, max_tokens=32)
    text, finish = "", inference_pb2.Finish()
    try:
        for message in client.Generate(inference_pb2.GenerateRequest(prompt=prompt, sampling=sampling)):
            text += message.text
            if message.HasField("finish"):
                finish = message.finish
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        raise SmokeError(f"{prompt!r}: {error.code().name}: {error.details()}") from None
    return text, finish
