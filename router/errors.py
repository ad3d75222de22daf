"""Errors of the router's own.

CheckpointError              start-up: the model directory cannot be served; one line, exit code 2
ServiceError                 (glmserve.service.status)
 +- UnsupportedError         UNIMPLEMENTED   this checkpoint lacks what the call needs
"""

from __future__ import annotations

import grpc

from glmserve.service.status import ServiceError


class CheckpointError(ValueError):
    """A file of the model directory is missing, damaged or not supported. The text names the file and the remedy."""


class UnsupportedError(ServiceError):
    """The served checkpoint lacks what the call needs."""

    code = grpc.StatusCode.UNIMPLEMENTED
