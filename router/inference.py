"""What the service does, whatever front a call comes over: checks, admission, prompt, generation.

The messages of glmserve.inference.v1 are the internal form too; a front that speaks another one translates.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

from glmserve.engine.v1 import engine_pb2
from glmserve.inference.v1 import inference_pb2
from glmserve.service.identity import Identity
from glmserve.service.status import InvalidArgumentError, NotFoundError
from router.call import Call
from router.dispatch.admission import Admission
from router.dispatch.request_run import FailoverLimits
from router.dispatch.worker_pool import WorkerPool
from router.errors import UnsupportedError, echo
from router.generation import Delta, Generation, GenerationPlan
from router.model import TextModel
from router.request_scope import RequestScope, open_scope
from router.telemetry import RouterTelemetry
from router.text.chat_template import TemplateRefusalError
from router.validation import (
    MAX_DETOKENIZE_IDS,
    MAX_MESSAGES,
    ModelLimits,
    check_count,
    check_priority,
    check_prompt,
    check_sampling,
    check_token_ids,
    engine_sampling,
)

_ROLES = {
    inference_pb2.ROLE_SYSTEM: "system",
    inference_pb2.ROLE_USER: "user",
    inference_pb2.ROLE_ASSISTANT: "assistant",
}


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
            field, prompt_ids = await self._prompt_ids(request, limits)
            plan = self._plan(scope, request, limits, field, prompt_ids)
            prompt_is_due = request.return_prompt_ids
            async for delta in self._run(scope, plan):
                response = inference_pb2.GenerateResponse(
                    request_id=scope.request_id, text=delta.text, token_ids=delta.token_ids
                )
                _add_extras(response, delta)
                if prompt_is_due:
                    response.prompt_ids.extend(prompt_ids)
                    prompt_is_due = False
                yield response

    async def chat(self, request: inference_pb2.ChatRequest, call: Call) -> AsyncIterator[inference_pb2.ChatResponse]:
        """Answer a conversation."""
        scope = await open_scope(call, "Chat", self._telemetry)
        with scope.recorded():
            limits = self._admit(scope, request, call.caller)
            prompt = self._render(request.messages)
            prompt_ids = await self._model.tokenizer.encode(prompt, add_special_tokens=False)
            plan = self._plan(scope, request, limits, "messages", prompt_ids)
            async for delta in self._run(scope, plan):
                response = inference_pb2.ChatResponse(
                    request_id=scope.request_id, content=delta.text, token_ids=delta.token_ids
                )
                _add_extras(response, delta)
                yield response

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
        """All that can be refused before the prompt is tokenised; takes a place."""
        check_priority(request.priority)
        scope.hold_ticket(self._admission.enter(caller, request.priority, scope.left_s))
        self._worker_info(request.model)
        check_sampling(request.sampling, self._model.vocab_size)
        return ModelLimits(self._pool.longest, self._model.vocab_size)

    async def _prompt_ids(
        self, request: inference_pb2.GenerateRequest, limits: ModelLimits
    ) -> tuple[str, Sequence[int]]:
        """The field the prompt is in, and its ids."""
        given = request.WhichOneof("input")
        if given == "prompt_ids":
            # Before each of them is looked at: a message has room for millions.
            check_prompt("prompt_ids.ids", request.prompt_ids.ids, limits)
            check_token_ids("prompt_ids.ids", request.prompt_ids.ids, self._model.vocab_size)
            return "prompt_ids.ids", list(request.prompt_ids.ids)
        if given is None:
            raise InvalidArgumentError("prompt", "missing; set prompt or prompt_ids")
        return "prompt", await self._model.tokenizer.encode(request.prompt, add_special_tokens=True)

    def _render(self, messages: Sequence[inference_pb2.ChatMessage]) -> str:
        if self._model.template is None:
            raise UnsupportedError("the served checkpoint has no chat template; use Generate")
        if not messages:
            raise InvalidArgumentError("messages", "empty; at least one message is needed")
        check_count("messages", len(messages), MAX_MESSAGES)
        plain = []
        for index, message in enumerate(messages):
            role = _ROLES.get(message.role)
            if role is None:
                raise InvalidArgumentError(
                    f"messages[{index}].role",
                    f"{message.role} is not a role; allowed: ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT",
                )
            plain.append({"role": role, "content": message.content})
        try:
            return self._model.template.render(plain)
        except TemplateRefusalError as error:
            raise InvalidArgumentError("messages", f"the chat template refuses them: {echo(str(error))}") from None

    def _plan(
        self,
        scope: RequestScope,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        limits: ModelLimits,
        field: str,
        prompt_ids: Sequence[int],
    ) -> GenerationPlan:
        check_prompt(field, prompt_ids, limits)
        params = engine_sampling(request.sampling, self._model.defaults, len(prompt_ids), limits)
        scope.add_prompt(len(prompt_ids), _least_tokens(request.sampling, params))
        return GenerationPlan(prompt_ids, params, tuple(request.sampling.stop), request.priority)

    def _run(self, scope: RequestScope, plan: GenerationPlan) -> AsyncIterator[Delta]:
        return Generation(scope, self._model.tokenizer, self._pool, self._failover, plan).deltas()


def _least_tokens(options: inference_pb2.SamplingOptions, params: engine_pb2.SamplingParams) -> int:
    """How many tokens will be generated for certain."""
    nothing_stops = params.ignore_eos and not (options.stop or options.stop_token_ids)
    return params.max_tokens if nothing_stops else max(1, params.min_tokens)


def _add_extras(response: inference_pb2.GenerateResponse | inference_pb2.ChatResponse, delta: Delta) -> None:
    """What few messages have: naming an empty field in the constructor costs as much as a full one."""
    if delta.logprobs:
        response.logprobs.extend(delta.logprobs)
    if delta.finish is not None:
        response.finish.CopyFrom(delta.finish)
