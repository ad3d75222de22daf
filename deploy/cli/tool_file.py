"""Tools in a file, in the form of OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from glmserve.inference.v1 import inference_pb2

_FORM = '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, ...]'


def read_tools(path: Path) -> list[inference_pb2.Tool]:
    """BadParameter: the file cannot be read or holds something else. What is in the tools is the router's to check."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_tool(entry["function"]) for entry in entries]
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: {error}", param_hint="--tools") from None
    except (KeyError, TypeError, AttributeError):
        raise typer.BadParameter(f"{path}: not of the form {_FORM}", param_hint="--tools") from None


def _tool(function: dict[str, Any]) -> inference_pb2.Tool:
    return inference_pb2.Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters_json_schema=json.dumps(function.get("parameters", {})),
        strict=function.get("strict", False),
    )
