"""GET /healthz, /readyz and /metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, Response

from glmserve.service.status import UnavailableError


@dataclass(frozen=True, slots=True)
class Probes:
    """`is_ready`: whether requests are taken now."""

    is_ready: Callable[[], bool]
    registry: CollectorRegistry | None


def add(app: FastAPI, probes: Probes) -> None:
    """Add the routes."""

    @app.get("/healthz")
    async def alive() -> Response:
        return JSONResponse({"status": "ok"})

    @app.get("/readyz")
    async def ready() -> Response:
        if not probes.is_ready():
            raise UnavailableError("no worker serves, or the router is shutting down")
        return JSONResponse({"status": "ok"})

    registry = probes.registry
    if registry is not None:

        @app.get("/metrics")
        async def metrics() -> Response:
            # On a thread: it asks every instrument.
            return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)
