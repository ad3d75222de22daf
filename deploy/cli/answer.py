"""The answer to one Generate call: collected, shown as it streams, printed as JSON."""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.cli.access import Access
from deploy.cli.client import inference, request_errors
from deploy.cli.console import messages
from deploy.errors import DeployError
from glmserve.inference.v1 import inference_pb2


@dataclass
class Answer:
    """What the messages of the stream add up to; `finish` is that of the last one."""

    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[inference_pb2.TokenLogprob] = field(default_factory=list)
    finish: inference_pb2.Finish = field(default_factory=inference_pb2.Finish)


def run(
    request: inference_pb2.GenerateRequest,
    model: str | None,
    target: str | None,
    access: Access,
    *,
    as_json: bool,
    worker_args: Sequence[str] = (),
) -> None:
    """Send the request to `target`, or to a local pair serving `model`, and print the answer."""
    with inference(model, target, access, worker_args) as client, request_errors():
        answer = collect(client.Generate(request), show=not as_json)
    if as_json:
        with_logprobs = request.sampling.HasField("logprobs")
        print(json.dumps(as_object(answer, with_logprobs=with_logprobs), ensure_ascii=False))
    else:
        messages.print(figures(answer.finish))


def collect(stream: Iterable[inference_pb2.GenerateResponse], *, show: bool) -> Answer:
    """Read the stream to its end; with `show`, write its text to stdout as it comes."""
    answer, finished = Answer(), False
    for message in stream:
        answer.prompt_ids.extend(message.prompt_ids)
        answer.token_ids.extend(message.token_ids)
        answer.text += message.text
        answer.logprobs.extend(message.logprobs)
        if message.HasField("finish"):
            answer.finish, finished = message.finish, True
        if show:
            sys.stdout.write(message.text)
            sys.stdout.flush()
    if show:
        sys.stdout.write("\n")
    if not finished:
        raise DeployError("the router ended the stream without a finish")
    return answer


def as_object(answer: Answer, *, with_logprobs: bool) -> dict[str, Any]:
    """The object that --json prints; times in microseconds from the router's receipt of the request."""
    usage, timings = answer.finish.usage, answer.finish.timings
    return {
        "prompt_ids": answer.prompt_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": finish_reason(answer.finish),
        "logprobs": [_logprob(entry) for entry in answer.logprobs] if with_logprobs else None,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "completion_tokens": usage.completion_tokens,
        },
        "timings": {
            "queue_us": timings.queue_us,
            "first_token_us": timings.first_token_us,
            "total_us": timings.total_us,
            "tokens_per_s": tokens_per_second(answer.finish),
        },
    }


def finish_reason(finish: inference_pb2.Finish) -> str:
    """FINISH_REASON_STOP is "stop"."""
    return inference_pb2.FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower()


def _logprob(entry: inference_pb2.TokenLogprob) -> dict[str, Any]:
    top = [{"id": other.token_id, "logprob": other.logprob} for other in entry.top]
    return {"id": entry.token_id, "logprob": entry.logprob, "top": top}


def tokens_per_second(finish: inference_pb2.Finish) -> float | None:
    """Of decoding: tokens after the first over the time since it. None if there was none."""
    tokens = finish.usage.completion_tokens - 1
    microseconds = finish.timings.total_us - finish.timings.first_token_us
    return tokens / microseconds * 1e6 if tokens > 0 and microseconds > 0 else None


def figures(finish: inference_pb2.Finish) -> str:
    """The line for people."""
    usage, speed = finish.usage, tokens_per_second(finish)
    parts = [
        f"time to first token {finish.timings.first_token_us / 1e6:.3f} s",
        *([f"{speed:.1f} tokens/s"] if speed else []),
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_prompt_tokens} cached)",
        f"completion {usage.completion_tokens} tokens",
        f"finish: {finish_reason(finish)}",
    ]
    return ", ".join(parts)
