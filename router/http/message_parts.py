"""Parts that a message has whole and streamed."""

from __future__ import annotations

from typing import Any

from glmserve.inference.v1 import inference_pb2

_STOP_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "end_turn",
    inference_pb2.FINISH_REASON_LENGTH: "max_tokens",
    inference_pb2.FINISH_REASON_TOOL_CALLS: "tool_use",
}


def message_id(request_id: str) -> str:
    """Of the message that answers a request."""
    return f"msg_{request_id}"


def signature(request_id: str) -> str:
    """Of a thinking block: where it comes from. Nothing here checks it; clients want one."""
    return f"glmserve-{request_id}"


def stop_of(finish: inference_pb2.Finish) -> dict[str, Any]:
    """Why the message ends. One of the client's stop sequences is named."""
    if finish.WhichOneof("stop") == "stop_string":
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop_string}
    return {"stop_reason": _STOP_REASONS[finish.reason], "stop_sequence": None}


def usage_json(usage: inference_pb2.Usage) -> dict[str, Any]:
    """This API counts prompt tokens out of the cache apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_prompt_tokens,
        "output_tokens": usage.completion_tokens,
    }
