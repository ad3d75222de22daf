"""The routes, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from glmserve.service.status import ServiceError
from router.http import chat_completions, completions, health, messages, models, tokens, web
from router.http.call import HttpCall
from router.http.errors import Failure, RouteError, refused_body
from router.http.exchange import CALL
from router.http.fields import Strict
from router.http.schema_anthropic import MessagePrompt, MessageRequest
from router.http.schema_openai import ChatCompletionRequest, CompletionRequest
from router.http.schema_tokens import DetokenizeBody, TokenizeBody
from router.inference import InferenceCore

Body = TypeVar("Body", bound=Strict)


async def _call(request: Request) -> HttpCall:
    call: HttpCall = getattr(request.state, CALL)
    return call


def _body(schema: type[Body]) -> Callable[[Request], Any]:
    """Pydantic's own JSON reader: it knows no NaN, no half of a surrogate pair, and no endless nesting."""

    async def read(request: Request) -> Body:
        try:
            return schema.model_validate_json(await request.body())
        except ValidationError as error:
            raise refused_body(error) from None

    return read


Call = Annotated[HttpCall, Depends(_call)]


def build_app(core: InferenceCore, probes: health.Probes, interval_s: float) -> FastAPI:
    """`interval_s`: least time between two events of a stream."""
    app = FastAPI(title="glmserve", openapi_url=None, docs_url=None, redoc_url=None)
    for kind in (HTTPException, ServiceError, Exception):
        app.add_exception_handler(kind, _failed)
    _add_openai(app, core, interval_s)
    _add_anthropic(app, core, interval_s)
    _add_tokens(app, core)
    web.add(app)
    models.add(app, core)
    health.add(app, probes)
    return app


def _add_openai(app: FastAPI, core: InferenceCore, interval_s: float) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completion(
        body: Annotated[ChatCompletionRequest, Depends(_body(ChatCompletionRequest))], call: Call
    ) -> Response:
        return await chat_completions.chat_completion(core, body, call, interval_s)

    @app.post("/v1/completions")
    async def completion(body: Annotated[CompletionRequest, Depends(_body(CompletionRequest))], call: Call) -> Response:
        return await completions.completion(core, body, call, interval_s)


def _add_anthropic(app: FastAPI, core: InferenceCore, interval_s: float) -> None:
    @app.post("/v1/messages")
    async def create_message(body: Annotated[MessageRequest, Depends(_body(MessageRequest))], call: Call) -> Response:
        return await messages.create_message(core, body, call, interval_s)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: Annotated[MessagePrompt, Depends(_body(MessagePrompt))], call: Call) -> dict[str, Any]:
        return await tokens.count_tokens(core, body, call)


def _add_tokens(app: FastAPI, core: InferenceCore) -> None:
    @app.post("/tokenize")
    async def tokenize(body: Annotated[TokenizeBody, Depends(_body(TokenizeBody))], call: Call) -> dict[str, Any]:
        return await tokens.tokenize(core, body, call)

    @app.post("/detokenize")
    async def detokenize(body: Annotated[DetokenizeBody, Depends(_body(DetokenizeBody))], call: Call) -> dict[str, Any]:
        return await tokens.detokenize(core, body, call)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path} is not served here"
        error = RouteError(message, error.status_code, error.headers or {})
    call: HttpCall = getattr(request.state, CALL)
    return Failure.of(error, call.names).response(request.url.path, call.response_headers, call.request_id)
