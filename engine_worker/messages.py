"""Engine records as messages of glmserve.engine.v1."""

from __future__ import annotations

from engine_worker.runtime.loop import TokenLogprobs
from engine_worker.scheduler.request import Finish, Reason, Usage
from glmserve.engine.v1 import engine_pb2

_REASONS = {reason: engine_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in Reason}


def finish_message(finish: Finish) -> engine_pb2.Finish:
    return engine_pb2.Finish(
        request_id=finish.key[1],
        reason=_REASONS[finish.reason],
        stop_token_id=finish.stop_token_id,
        usage=usage_message(finish.usage),
        seed=finish.seed,
    )


def usage_message(usage: Usage) -> engine_pb2.Usage:
    return engine_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        completion_tokens=usage.completion_tokens,
        preemptions=usage.preemptions,
        queue_us=int(usage.queue_s * 1e6),
        first_token_us=int(usage.first_token_s * 1e6),
        total_us=int(usage.total_s * 1e6),
    )


def logprobs_message(logprobs: TokenLogprobs) -> engine_pb2.TokenLogprobs:
    return engine_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_token_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )
