"""GET /v1/models, for OpenAI's clients and Anthropic's: what is served, with the fields of both."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI

from glmserve.inference.v1 import inference_pb2
from router.inference import InferenceCore


def add(app: FastAPI, core: InferenceCore) -> None:
    """Add the routes."""
    # When a model was made is not known here; this is since when it is served.
    created = int(time.time())

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        model = _model(await core.get_model(inference_pb2.GetModelRequest()), created)
        return {
            "object": "list",
            "data": [model],
            "has_more": False,
            "first_id": model["id"],
            "last_id": model["id"],
        }

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> dict[str, Any]:
        return _model(await core.get_model(inference_pb2.GetModelRequest(model=name)), created)


def _model(info: inference_pb2.GetModelResponse, created: int) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": created,
        "owned_by": "glmserve",
        "max_model_len": info.max_context,
        "type": "model",
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
    }
