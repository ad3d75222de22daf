"""Errors of the router's own.

CheckpointError              start-up: the model directory cannot be served; one line, exit code 2
ServiceError                 (glmserve.service.status)
 +- UnsupportedError         UNIMPLEMENTED   this checkpoint lacks what the call needs
 +- UnavailableError         UNAVAILABLE     (glmserve.service.status)
     +- WorkerLostError                      a worker cannot go on with a request that another one can
"""

from __future__ import annotations

import grpc

from glmserve.service.status import ServiceError, UnavailableError


class CheckpointError(ValueError):
    """A file of the model directory is missing, damaged or not supported. The text names the file and the remedy."""


class UnsupportedError(ServiceError):
    """The served checkpoint lacks what the call needs."""

    code = grpc.StatusCode.UNIMPLEMENTED


class WorkerLostError(UnavailableError):
    """A worker cannot go on with a request that another one can."""


# A status travels in HTTP/2 trailers, whose size is limited: a longer echo of the client's value would lose the status.
_MAX_ECHO = 200


def echo(text: str) -> str:
    """`text` as an error message may quote it."""
    return text if len(text) <= _MAX_ECHO else f"{text[:_MAX_ECHO]}... ({len(text)} characters)"
