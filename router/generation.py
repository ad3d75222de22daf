"""One request from submit to finish: ids become text, text ends at a stop string, the finish gets its figures."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import ServiceError
from router.dispatch.request_run import FailoverLimits, RequestRun
from router.dispatch.token_stream import Chunk
from router.dispatch.worker_pool import WorkerPool
from router.request_scope import RequestScope
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """A checked request, in the worker's terms. `stops`: stop strings, which the worker does not know of."""

    prompt_ids: Sequence[int]
    params: engine_pb2.SamplingParams
    stops: Sequence[str]
    priority: int


@dataclass(slots=True)
class Delta:
    """What a message to the client carries. `finish` is set in the last one."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[inference_pb2.TokenLogprob]
    finish: inference_pb2.Finish | None = None


class Generation:
    """Runs one plan.

    Ids are delivered as they come; text may lag behind them. Up to and including the id that completes a stop string,
    ids are delivered and counted; what the worker samples beyond it, before it hears of the stop, is neither. The text
    of a stop id is no part of the text; its id is delivered.
    """

    def __init__(
        self,
        scope: RequestScope,
        tokenizer: TextTokenizer,
        pool: WorkerPool,
        failover: FailoverLimits,
        plan: GenerationPlan,
    ) -> None:
        self._scope = scope
        self._token_bytes = tokenizer.token_bytes
        self._pool = pool
        self._failover = failover
        self._plan = plan
        self._detokenizer = Detokenizer(tokenizer, plan.prompt_ids)
        self._stops = StopStrings(plan.stops)

    async def deltas(self) -> AsyncIterator[Delta]:
        """Everything the client gets, in order. Raises ServiceError: the request failed."""
        run = self._submit()
        while True:
            chunk = await run.read()
            delta = self._advance(chunk)
            if self._stops.matched is not None:
                if delta.token_ids:
                    yield delta
                yield await self._stopped(run, chunk)
                return
            if chunk.finish is not None:
                delta.finish = self._finish(chunk.finish)
            yield delta
            if chunk.finish is not None:
                return

    def _submit(self) -> RequestRun:
        submit = engine_pb2.Submit(
            prompt_token_ids=self._plan.prompt_ids,
            sampling=self._plan.params,
            priority=self._plan.priority,
            trace_id=self._scope.trace_id,
            traceparent=self._scope.traceparent,
        )
        run = RequestRun(self._pool, submit, self._scope.request_id, self._scope.timeout_ms, self._failover)
        self._scope.submitted_at = time.perf_counter()
        self._scope.hold_run(run)
        return run

    def _advance(self, chunk: Chunk) -> Delta:
        """Text and ids of `chunk`, up to a stop string if one is completed in it."""
        ids = chunk.token_ids
        if ids and self._scope.first_token_at is None:
            self._scope.began()
        spoken = ids[:-1] if chunk.finish is not None and chunk.finish.HasField("stop_token_id") else ids
        text, taken = self._text(spoken)
        if self._stops.matched is not None:
            ids = ids[:taken]
        elif chunk.finish is not None:
            text += self._stops.push(self._detokenizer.finish()) + self._stops.finish()
        self._scope.completion_tokens += len(ids)
        return Delta(text, ids, self._logprobs(ids, chunk.logprobs) if chunk.logprobs else ())

    def _text(self, ids: Sequence[int]) -> tuple[str, int]:
        """The text of `ids`, and how many of them it took: all, unless a stop string is complete before."""
        if not self._plan.stops:
            return self._detokenizer.push(ids), len(ids)
        # The first min_tokens ids cannot end the text, nor begin what ends it.
        exempt = self._plan.params.min_tokens - self._scope.completion_tokens
        text = ""
        for position, token_id in enumerate(ids):
            piece = self._detokenizer.push((token_id,))
            text += piece if position < exempt else self._stops.push(piece)
            if self._stops.matched is not None:
                return text, position + 1
        return text, len(ids)

    def _logprobs(
        self, ids: Sequence[int], logprobs: Sequence[engine_pb2.TokenLogprobs]
    ) -> list[inference_pb2.TokenLogprob]:
        table = self._token_bytes
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

    async def _stopped(self, run: RequestRun, chunk: Chunk) -> Delta:
        """The last message of a request that a stop string ended."""
        finish = chunk.finish
        if finish is None:
            run.abort()
            finish = await _last_word(run)
        return Delta("", (), (), self._finish(finish))

    def _finish(self, finish: engine_pb2.Finish) -> inference_pb2.Finish:
        scope = self._scope
        first_token_us = _microseconds((scope.first_token_at or scope.started) - scope.started)
        queue_us = _microseconds((scope.submitted_at or scope.started) - scope.started) + finish.usage.queue_us
        result = inference_pb2.Finish(
            reason=inference_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(
                prompt_tokens=len(self._plan.prompt_ids),
                cached_prompt_tokens=finish.usage.cached_prompt_tokens,
                completion_tokens=scope.completion_tokens,
            ),
            timings=inference_pb2.Timings(
                # Of a request that was moved, the last worker may have a queue time from after its first token.
                queue_us=min(queue_us, first_token_us),
                first_token_us=first_token_us,
                total_us=_microseconds(time.perf_counter() - scope.started),
            ),
            seed=self._plan.params.seed,
        )
        if self._stops.matched is not None:
            result.stop_string = self._stops.matched
        elif finish.reason == engine_pb2.FINISH_REASON_LENGTH:
            result.reason = inference_pb2.FINISH_REASON_LENGTH
        elif finish.HasField("stop_token_id"):
            result.stop_token_id = finish.stop_token_id
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


def _microseconds(seconds: float) -> int:
    return int(seconds * 1_000_000)
