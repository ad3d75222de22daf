"""Turns away RPCs without a valid API key, and tells handlers whose key it was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from glmserve.service.identity import Identity, assume
from glmserve.service.reload import Reloaded
from glmserve.service.status import UnauthenticatedError, with_behaviour
from router.access.keys import Keys

_HEADER = "authorization"
_SCHEME = "bearer"
# For probes and load balancers, which have no key: whether we serve is no secret.
_OPEN_METHODS = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Expects `authorization: Bearer KEY`. Raises nothing: a refused RPC ends UNAUTHENTICATED, its message unparsed."""

    def __init__(self, keys: Reloaded[Keys]) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Runs in the task of the RPC, as its handler will."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method in _OPEN_METHODS:
            return handler
        try:
            assume(self._identify(handler_call_details))
        except UnauthenticatedError as error:
            return with_behaviour(handler, _refusing(error, streaming=handler.response_streaming), None)
        return handler

    def _identify(self, details: grpc.HandlerCallDetails) -> Identity:
        given = [value for name, value in details.invocation_metadata or () if name == _HEADER]
        if not given:
            raise UnauthenticatedError(f"no API key; send the metadata {_HEADER}: Bearer KEY")
        scheme, _, key = str(given[0]).partition(" ")
        if len(given) > 1 or scheme.lower() != _SCHEME or not key:
            raise UnauthenticatedError(f"{_HEADER}: not one value of the form Bearer KEY")
        identity = self._keys.current().identify(key)
        if identity is None:
            raise UnauthenticatedError("the API key is not known here; ask the operator for one (`glm key create`)")
        return identity


def _refusing(error: UnauthenticatedError, *, streaming: bool) -> Callable[..., Any]:
    async def refuse(_request: object, _context: object) -> None:
        raise error

    async def refuse_stream(_request: object, _context: object) -> Any:
        raise error
        yield  # a generator, as the handler it stands for

    return refuse_stream if streaming else refuse
