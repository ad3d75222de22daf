"""The worker's ways to end a request, as errors for the client."""

from __future__ import annotations

import uuid
from typing import Any

import structlog

from glmserve.engine.v1 import engine_pb2
from glmserve.service.status import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    OverloadedError,
    ServiceError,
)
from router.errors import WorkerLostError

log = structlog.get_logger()

# Paths in Submit that are called otherwise in the public request.
_PUBLIC_FIELDS = {"prompt_token_ids": "prompt"}


def finish_error(finish: engine_pb2.Finish, request_id: str) -> ServiceError | None:
    """The error behind a finish; None for one that is a result (a stop or the length)."""
    reason = finish.reason
    if reason in (engine_pb2.FINISH_REASON_STOP, engine_pb2.FINISH_REASON_LENGTH):
        return None
    if reason == engine_pb2.FINISH_REASON_TIMEOUT:
        return DeadlineError("the deadline passed before the request was done")
    if reason == engine_pb2.FINISH_REASON_UNAVAILABLE:
        return WorkerLostError("the engine worker is shutting down or failed; try again")
    if reason == engine_pb2.FINISH_REASON_CONSTRAINT_ERROR:
        return InvalidArgumentError("constraint", "too costly to follow at this point of the answer; use a simpler one")
    name = _name(engine_pb2.FinishReason, reason)
    log.error("worker_failed_request", error_id=request_id, reason=name)
    if reason == engine_pb2.FINISH_REASON_NUMERICAL_ERROR:
        return InternalError("the model's logits were all NaN or -inf", request_id)
    return InternalError(f"the worker ended the request with {name}", request_id)


def rejection_error(rejection: engine_pb2.Rejection) -> ServiceError:
    """The error behind a submit that was not accepted."""
    if rejection.reason == engine_pb2.REJECTION_REASON_INVALID:
        return InvalidArgumentError(_PUBLIC_FIELDS.get(rejection.field, rejection.field), rejection.message)
    if rejection.reason == engine_pb2.REJECTION_REASON_OVERLOADED:
        return OverloadedError(rejection.message, rejection.retry_after_ms, "worker")
    if rejection.reason == engine_pb2.REJECTION_REASON_UNAVAILABLE:
        return WorkerLostError(rejection.message)
    error_id = uuid.uuid4().hex
    name = _name(engine_pb2.RejectionReason, rejection.reason)
    log.error("worker_rejected_request", error_id=error_id, reason=name, message=rejection.message)
    return InternalError(f"the worker rejected the request with {name}", error_id)


def _name(enum: Any, value: int) -> str:
    return str(enum.Name(value)) if value in enum.values() else f"{enum.DESCRIPTOR.name} {value}"
