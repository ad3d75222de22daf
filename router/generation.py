"""One choice from submit to finish: ids become an answer, which may end before they do; the finish gets its figures."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import ServiceError
from router.dispatch.request_run import FailoverLimits, RequestRun
from router.dispatch.token_stream import Chunk
from router.dispatch.worker_pool import WorkerPool
from router.request_scope import RequestScope
from router.text.reader import Piece, Reader

_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A checked request, in the worker's terms. `new_reader`: for the ids of one choice.

    `token_bytes[id]`: the bytes the id stands for.
    """

    prompt_ids: Sequence[int]
    params: engine_pb2.SamplingParams
    priority: int
    new_reader: Callable[[], Reader]
    token_bytes: Sequence[bytes]


@dataclass(slots=True)
class Delta:
    """What a message to the client carries. `finish` is set in the last one of a choice."""

    choice: int
    piece: Piece
    token_ids: Sequence[int] = ()
    logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    prompt_logprobs: Sequence[inference_pb2.TokenLogprob] = ()
    finish: inference_pb2.Finish | None = None


class Generation:
    """Runs one choice of a plan.

    Ids are delivered as they come; what they mean may lag behind them. Up to and including the id that completes a stop
    string, or whatever else ends the answer, ids are delivered and counted; what the worker samples beyond it, before
    it hears of it, is neither. The text of a stop id is no part of the text; its id is delivered.
    """

    def __init__(
        self, scope: RequestScope, pool: WorkerPool, failover: FailoverLimits, plan: GenerationPlan, choice: int = 0
    ) -> None:
        self._scope = scope
        self._pool = pool
        self._failover = failover
        self._plan = plan
        self._choice = choice
        self._reader = plan.new_reader()
        self._completion_tokens = 0
        self._params = _params(plan.params, choice)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything the client gets of this choice, in order. Raises ServiceError: the request failed."""
        run = self._submit()
        while True:
            chunk = await run.read()
            delta = self._advance(chunk)
            if self._reader.ended:
                if delta.token_ids:
                    yield delta
                yield await self._ended(run, chunk)
                return
            if chunk.finish is not None:
                delta.finish = self._finish(chunk.finish)
            yield delta
            if chunk.finish is not None:
                return

    def _submit(self) -> RequestRun:
        submit = engine_pb2.Submit(
            prompt_token_ids=self._plan.prompt_ids,
            sampling=self._params,
            priority=self._plan.priority,
            trace_id=self._scope.trace_id,
            traceparent=self._scope.traceparent,
        )
        run = RequestRun(self._pool, submit, self._scope.request_id, self._scope.timeout_ms, self._failover)
        self._scope.hold_run(run)
        return run

    def _advance(self, chunk: Chunk) -> Delta:
        """What `chunk` brings, up to where the answer ends if it ends in there."""
        ids, finish = chunk.token_ids, chunk.finish
        if ids:
            self._scope.began()
        stopped = finish is not None and finish.HasField("stop_token_id")
        taken = self._reader.push(ids[:-1] if stopped else ids)
        if self._reader.ended:
            ids = ids[:taken]
        elif finish is not None:
            self._reader.finish(stopped=finish.reason == engine_pb2.FINISH_REASON_STOP)
        self._completion_tokens += len(ids)
        self._scope.completion_tokens += len(ids)
        delta = Delta(self._choice, self._reader.take(), ids)
        if chunk.logprobs:
            delta.logprobs = self._logprobs(ids, chunk.logprobs)
        if chunk.prompt_logprobs:
            delta.prompt_logprobs = self._logprobs(self._plan.prompt_ids, chunk.prompt_logprobs)
        return delta

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[engine_pb2.TokenLogprobs]
    ) -> list[inference_pb2.TokenLogprob]:
        table = self._plan.token_bytes
        return [
            inference_pb2.TokenLogprob(
                token_id=token_id,
                token=table[token_id],
                logprob=given.logprob,
                top=[
                    inference_pb2.TopLogprob(token_id=top_id, token=table[top_id], logprob=logprob)
                    for top_id, logprob in zip(given.top_token_ids, given.top_logprobs, strict=True)
                ],
            )
            for token_id, given in zip(ids, logprobs, strict=False)
        ]

    async def _ended(self, run: RequestRun, chunk: Chunk) -> Delta:
        """The last message of an answer that ended before its ids."""
        finish = chunk.finish
        if finish is None:
            run.abort()
            finish = await _last_word(run)
        self._reader.finish(stopped=True)
        return Delta(self._choice, self._reader.take(), finish=self._finish(finish))

    def _finish(self, finish: engine_pb2.Finish) -> inference_pb2.Finish:
        scope = self._scope
        first_token_us = _microseconds((scope.first_token_at or scope.started) - scope.started)
        queue_us = _microseconds((scope.submitted_at or scope.started) - scope.started) + finish.usage.queue_us
        result = inference_pb2.Finish(
            reason=inference_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(
                prompt_tokens=len(self._plan.prompt_ids),
                cached_prompt_tokens=finish.usage.cached_prompt_tokens,
                completion_tokens=self._completion_tokens,
                reasoning_tokens=self._reader.reasoning_tokens,
            ),
            timings=inference_pb2.Timings(
                # Of a request that was moved, the last worker may have a queue time from after its first token.
                queue_us=min(queue_us, first_token_us),
                first_token_us=first_token_us,
                total_us=_microseconds(time.perf_counter() - scope.started),
            ),
            seed=self._params.seed,
        )
        if self._reader.stop is not None:
            result.stop_string = self._reader.stop
        elif self._reader.ended:
            result.reason = inference_pb2.FINISH_REASON_TOOL_CALLS
        elif finish.reason == engine_pb2.FINISH_REASON_LENGTH:
            result.reason = inference_pb2.FINISH_REASON_LENGTH
        elif finish.HasField("stop_token_id"):
            result.stop_token_id = finish.stop_token_id
            if self._reader.calls_whole:
                result.reason = inference_pb2.FINISH_REASON_TOOL_CALLS
        scope.finish(result)
        return result


async def _last_word(run: RequestRun) -> engine_pb2.Finish:
    """The finish of an aborted run. An empty one if the worker is lost meanwhile: the text is complete as it is."""
    try:
        while True:
            chunk = await run.read()
            if chunk.finish is not None:
                return chunk.finish
    except ServiceError:
        return engine_pb2.Finish()


def _params(params: engine_pb2.SamplingParams, choice: int) -> engine_pb2.SamplingParams:
    """Of a choice: a seed of its own; the prompt's log-probabilities are those of the first."""
    if choice == 0:
        return params
    own = engine_pb2.SamplingParams()
    own.CopyFrom(params)
    own.seed = (params.seed + choice) % _SEEDS
    own.ClearField("prompt_logprobs")
    return own


def _microseconds(seconds: float) -> int:
    return int(seconds * 1_000_000)
