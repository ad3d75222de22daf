"""POST /tokenize, /detokenize and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.http.call import HttpCall
from router.http.chat_request import chat_prompt
from router.http.errors import Names
from router.http.message_request import message_prompt
from router.http.schema_anthropic import MessagePrompt
from router.http.schema_tokens import DetokenizeBody, TokenizeBody
from router.inference import InferenceCore


async def tokenize(core: InferenceCore, body: TokenizeBody, call: HttpCall) -> dict[str, Any]:
    """Ids of a text, or of a chat's prompt."""
    model = await core.get_model(inference_pb2.GetModelRequest(model=body.model))
    if body.prompt is not None:
        if body.messages:
            raise InvalidArgumentError("messages", "cannot be given together with prompt")
        request = inference_pb2.TokenizeRequest(text=body.prompt, add_special_tokens=body.add_special_tokens)
        ids = list((await core.tokenize(request, call)).ids)
    else:
        ids = await core.chat_prompt_ids(chat_prompt(body), call)
    return {"tokens": ids, "count": len(ids), "max_model_len": model.max_context}


async def detokenize(core: InferenceCore, body: DetokenizeBody, call: HttpCall) -> dict[str, Any]:
    """The text of ids."""
    await core.get_model(inference_pb2.GetModelRequest(model=body.model))
    call.names = Names((("ids", "tokens"),))
    request = inference_pb2.DetokenizeRequest(ids=body.tokens, skip_special_tokens=body.skip_special_tokens)
    return {"prompt": (await core.detokenize(request, call)).text}


async def count_tokens(core: InferenceCore, body: MessagePrompt, call: HttpCall) -> dict[str, Any]:
    """How long a message's prompt would be."""
    request, call.names = message_prompt(body)
    ids = await core.chat_prompt_ids(request, call)
    return {"input_tokens": len(ids)}
