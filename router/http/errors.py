"""Errors as HTTP clients know them: status, headers, and a body in OpenAI's or Anthropic's form.

ServiceError                  (glmserve.service.status): by its gRPC status
 +- BodyTooLargeError         413
 +- BodyTimeoutError          408
 +- RouteError                404 or 405: no such path or method
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from pydantic import ValidationError
from starlette.responses import Response

from glmserve.service.status import InternalError, InvalidArgumentError, OverloadedError, ServiceError
from router.errors import echo

log = structlog.get_logger()

ANTHROPIC_PATHS = "/v1/messages"
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
# What each API calls the kind of an error, by status; of others 5xx is the last one's.
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", 504: "deadline_exceeded"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Why a field of OpenAI's or Anthropic's that would change the answer is refused.
_REFUSED_FIELDS = {
    "functions": "superseded; use tools",
    "function_call": "superseded; use tools and tool_choice",
    "audio": "only text is served",
    "web_search_options": "nothing is searched here",
    "moderation": "nothing is moderated here",
    "mcp_servers": "no server of tools is called from here",
}


class BodyTooLargeError(ServiceError):
    """A request's body is over the limit."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class BodyTimeoutError(ServiceError):
    """A request's body did not come in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RouteError(ServiceError):
    """Nothing is served at a path, or not by this method."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, message: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


_TURN = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Names:
    """Pieces of our field names, and what a client calls them: its errors speak its own language.

    `turns`: what the client calls each of our messages, where they are not one to one.
    """

    pieces: Sequence[tuple[str, str]] = ()
    turns: Sequence[str] = ()

    def of(self, field: str) -> str:
        """The client's name of `field`."""
        turn = _TURN.match(field)
        if turn and self.turns:
            field = self.turns[int(turn[1])] + field[turn.end() :]
        for ours, theirs in self.pieces:
            field = field.replace(ours, theirs)
        return field


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, in the terms of HTTP."""

    status: int
    message: str
    headers: Mapping[str, str]
    param: str | None = None

    @classmethod
    def of(cls, error: Exception, names: Names) -> Failure:
        """What is no ServiceError is our fault: it is logged, and the client gets the id of the log line."""
        if not isinstance(error, ServiceError):
            error_id = uuid.uuid4().hex
            log.error("unhandled_error", error_id=error_id, exc_info=error)
            error = InternalError("internal error", error_id)
        if isinstance(error, InvalidArgumentError):
            param = names.of(error.field)
            return cls(400, f"{param}: {error.description}" if param else error.description, {}, param or None)
        return cls(_status(error), str(error), _headers(error))

    @property
    def openai(self) -> dict[str, Any]:
        """The body in OpenAI's form."""
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        code = _OPENAI_CODES.get(self.status)
        if self.status == 404 and self.message.startswith("model:"):
            code = "model_not_found"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    def anthropic(self, request_id: str | None) -> dict[str, Any]:
        """The body in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}

    def response(self, path: str, headers: Mapping[str, str], request_id: str | None) -> Response:
        """The whole answer to a request of `path`."""
        body = self.anthropic(request_id) if path.startswith(ANTHROPIC_PATHS) else self.openai
        return Response(json.dumps(body), self.status, {**headers, **self.headers}, "application/json")


def _status(error: ServiceError) -> int:
    if isinstance(error, BodyTooLargeError):
        return 413
    if isinstance(error, BodyTimeoutError):
        return 408
    return error.status if isinstance(error, RouteError) else _STATUS.get(error.code, 500)


def _headers(error: ServiceError) -> Mapping[str, str]:
    if isinstance(error, OverloadedError):
        # The second is what the official clients read first, because it is finer.
        seconds = max(1, math.ceil(error.retry_after_ms / 1000))
        return {"retry-after": str(seconds), "retry-after-ms": str(error.retry_after_ms)}
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return {"www-authenticate": "Bearer"}
    return error.headers if isinstance(error, RouteError) else {}


def refused_body(error: ValidationError) -> InvalidArgumentError:
    """The one problem of a request's body that says most: of a union, what the branch that came furthest says."""
    problem = max(error.errors(), key=lambda item: (not item["type"].endswith("_type"), len(item["loc"])))
    field = _path(problem["loc"])
    match problem["type"]:
        case "json_invalid":
            return InvalidArgumentError("", f"the body is not JSON: {problem['ctx']['error']}")
        case "missing":
            return InvalidArgumentError(field, "missing; it is required")
        case "extra_forbidden":
            reason = _REFUSED_FIELDS.get(str(problem["loc"][-1]), "not known here; remove it")
            return InvalidArgumentError(field, reason)
    return InvalidArgumentError(field, f"{problem['msg']} (given: {echo(repr(problem['input']))})")


# What pydantic puts into a path for a branch of a union: the name of a type.
_BRANCH = re.compile(r"[A-Z].*|.*[\[(].*|str|int|bool|float")


def _path(location: Sequence[str | int]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not _BRANCH.fullmatch(part):
            path += f".{part}" if path else part
    return path
