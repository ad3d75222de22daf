"""What the service does, whatever front a call comes over: checks, admission, prompt, generation.

The messages of glmserve.inference.v1 are the internal form too; a front that speaks another one translates.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.identity import Identity
from glmserve.service.status import NotFoundError
from router.call import Call
from router.chat import chat_plan
from router.choices import best_choices, run_choices
from router.constraints import check_constraint, engine_constraint
from router.dispatch.admission import Admission
from router.dispatch.request_run import FailoverLimits
from router.dispatch.worker_pool import WorkerPool
from router.errors import UnsupportedError, echo
from router.generation import Delta, Generation, GenerationPlan
from router.model import TextModel
from router.prompt import prompt_of
from router.request_scope import RequestScope, open_scope
from router.telemetry import RouterTelemetry
from router.text.detokenizer import Detokenizer
from router.text.reader import Reader, TextReader
from router.validation import (
    MAX_DETOKENIZE_IDS,
    ModelLimits,
    check_count,
    check_priority,
    check_prompt,
    check_sampling,
    check_token_ids,
    engine_sampling,
    num_choices,
)


class InferenceCore:
    """One method a call of the service. Stateless between requests. Failures are raised as ServiceError."""

    def __init__(
        self,
        model: TextModel,
        pool: WorkerPool,
        failover: FailoverLimits,
        admission: Admission,
        telemetry: RouterTelemetry,
    ) -> None:
        self._model = model
        self._pool = pool
        self._failover = failover
        self._admission = admission
        self._telemetry = telemetry

    async def generate(
        self, request: inference_pb2.GenerateRequest, call: Call
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Continue a prompt."""
        scope = await open_scope(call, "Generate", self._telemetry)
        with scope.recorded():
            limits = self._admit(scope, request, call.caller)
            if request.sampling.HasField("prompt_logprobs") and not self._pool.info.prompt_logprobs:
                raise UnsupportedError("sampling.prompt_logprobs: the engine does not compute them; leave it unset")
            if request.HasField("constraint"):
                await check_constraint("constraint", request.constraint)
            prompt = await prompt_of(request, self._model, limits)
            params = self._params(scope, request, limits, prompt.field, prompt.ids)
            if request.HasField("constraint"):
                params.constraint.CopyFrom(engine_constraint(request.constraint, None))

            def new_reader() -> Reader:
                detokenizer = Detokenizer(self._model.tokenizer, prompt.ids, echoes=prompt.echo is not None)
                return TextReader(detokenizer, request.sampling.stop, params.min_tokens, prompt.echo or "")

            prompt_is_due = request.return_prompt_ids
            async for delta in self._run(scope, request, prompt.ids, params, new_reader):
                response = inference_pb2.GenerateResponse(
                    request_id=scope.request_id, text=delta.piece.content, token_ids=delta.token_ids
                )
                if prompt_is_due:
                    response.prompt_ids.extend(prompt.ids)
                    prompt_is_due = False
                if delta.prompt_logprobs:
                    response.prompt_logprobs.extend(delta.prompt_logprobs)
                _add_extras(response, delta)
                yield response

    async def chat(self, request: inference_pb2.ChatRequest, call: Call) -> AsyncIterator[inference_pb2.ChatResponse]:
        """Answer a conversation."""
        scope = await open_scope(call, "Chat", self._telemetry)
        with scope.recorded():
            limits = self._admit(scope, request, call.caller)
            plan = await chat_plan(request, self._model)
            prompt_ids = await self._model.tokenizer.encode(plan.prompt, add_special_tokens=False)
            params = self._params(scope, request, limits, "messages", prompt_ids)
            if plan.constraint is not None:
                params.constraint.CopyFrom(plan.constraint)
            prompt_is_due = request.return_prompt_ids
            async for delta in self._run(scope, request, prompt_ids, params, plan.new_reader):
                response = inference_pb2.ChatResponse(
                    request_id=scope.request_id, content=delta.piece.content, token_ids=delta.token_ids
                )
                if prompt_is_due:
                    response.prompt_ids.extend(prompt_ids)
                    prompt_is_due = False
                if delta.piece.reasoning:
                    response.reasoning = delta.piece.reasoning
                if delta.piece.calls:
                    response.tool_calls.extend(delta.piece.calls)
                _add_extras(response, delta)
                yield response

    async def chat_prompt_ids(self, request: inference_pb2.ChatRequest, call: Call) -> list[int]:
        """What the model is asked by `request`, of which the sampling does not matter."""
        self._worker_info(request.model)
        with self._place(call):
            plan = await chat_plan(request, self._model)
            return await self._model.tokenizer.encode(plan.prompt, add_special_tokens=False)

    async def tokenize(self, request: inference_pb2.TokenizeRequest, call: Call) -> inference_pb2.TokenizeResponse:
        """Text to ids."""
        with self._place(call):
            ids = await self._model.tokenizer.encode(request.text, add_special_tokens=request.add_special_tokens)
        return inference_pb2.TokenizeResponse(ids=ids)

    async def detokenize(
        self, request: inference_pb2.DetokenizeRequest, call: Call
    ) -> inference_pb2.DetokenizeResponse:
        """Ids to text."""
        check_count("ids", len(request.ids), MAX_DETOKENIZE_IDS)
        check_token_ids("ids", request.ids, self._model.vocab_size)
        with self._place(call):
            text = await asyncio.to_thread(
                self._model.tokenizer.decode, request.ids, skip_special_tokens=request.skip_special_tokens
            )
        return inference_pb2.DetokenizeResponse(text=text)

    async def get_model(self, request: inference_pb2.GetModelRequest) -> inference_pb2.GetModelResponse:
        """What is served, as the worker tells."""
        info = self._worker_info(request.model)
        return inference_pb2.GetModelResponse(
            name=info.model_name,
            revision=info.model_revision,
            vocab_size=info.vocab_size,
            max_context=self._pool.longest,
            eos_token_ids=info.eos_token_ids,
            worker_version=info.version,
            device=info.device,
        )

    def _worker_info(self, model: str) -> engine_pb2.GetInfoResponse:
        """Raises UnavailableError: no worker. Raises NotFoundError: it serves another model."""
        info = self._pool.info
        if model not in ("", info.model_name):
            raise NotFoundError(f"model: {echo(model)!r} is not served here; served: {info.model_name!r}")
        return info

    @contextlib.contextmanager
    def _place(self, call: Call) -> Iterator[None]:
        """A place for work of our own, which has no priority: the caller's highest, if that is below 0."""
        caller = call.caller
        priority = 0 if caller.max_priority is None else min(0, caller.max_priority)
        ticket = self._admission.enter(caller, priority, call.time_remaining())
        try:
            yield
        finally:
            ticket.leave(0)

    def _admit(
        self,
        scope: RequestScope,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        caller: Identity,
    ) -> ModelLimits:
        """All that can be refused before the prompt is tokenised; takes a place for each choice."""
        check_priority(request.priority)
        places = num_choices(request.sampling).generated
        scope.hold_ticket(self._admission.enter(caller, request.priority, scope.left_s, places))
        self._worker_info(request.model)
        check_sampling(request.sampling, self._model.vocab_size)
        return ModelLimits(self._pool.longest, self._model.vocab_size)

    def _params(
        self,
        scope: RequestScope,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        limits: ModelLimits,
        field: str,
        prompt_ids: Sequence[int],
    ) -> engine_pb2.SamplingParams:
        check_prompt(field, prompt_ids, limits)
        params = engine_sampling(request.sampling, self._model.defaults, len(prompt_ids), limits)
        scope.add_prompt(len(prompt_ids), _least_tokens(request.sampling, params))
        return params

    def _run(
        self,
        scope: RequestScope,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        prompt_ids: Sequence[int],
        params: engine_pb2.SamplingParams,
        new_reader: Callable[[], Reader],
    ) -> AsyncIterator[Delta]:
        choices = num_choices(request.sampling)
        ranks = choices.sent < choices.generated
        if ranks and not params.HasField("logprobs"):
            params.logprobs = 0
        token_bytes = self._model.tokenizer.token_bytes
        plan = GenerationPlan(prompt_ids, params, request.priority, new_reader, token_bytes)
        deltas = run_choices(
            scope, lambda number: Generation(scope, self._pool, self._failover, plan, number), choices.generated
        )
        if not ranks:
            return deltas
        return best_choices(deltas, choices.sent, logprobs=request.sampling.HasField("logprobs"))


def _least_tokens(options: inference_pb2.SamplingOptions, params: engine_pb2.SamplingParams) -> int:
    """How many tokens will be generated for certain."""
    nothing_stops = params.ignore_eos and not (options.stop or options.stop_token_ids)
    return params.max_tokens if nothing_stops else max(1, params.min_tokens)


def _add_extras(response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse, delta: Delta) -> None:
    """What few messages have: naming an empty field in the constructor costs as much as a full one."""
    if delta.choice:
        response.choice = delta.choice
    if delta.logprobs:
        response.logprobs.extend(delta.logprobs)
    if delta.finish is not None:
        response.finish.CopyFrom(delta.finish)
