"""Tools for a chat template that shows none: Hermes' convention, in messages that any template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.tool_calls import END_TOOL_CALL, TOOL_CALL

_BEFORE = """You may call functions. Their signatures, one JSON object a line:
<tools>
"""
_AFTER = f"""
</tools>
To call one, answer with its name and arguments as a JSON object between tags:
{TOOL_CALL}
{{"name": NAME, "arguments": {{...}}}}
{END_TOOL_CALL}"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with `tools` in the system's content, calls in the assistant's, and results in the user's."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**others, "content": _content(message)})
            continue
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if plain and plain[-1]["role"] == "user" and plain[-1]["content"].endswith("</tool_response>"):
            plain[-1]["content"] += f"\n{result}"
        else:
            plain.append({"role": "user", "content": result})
    if tools:
        shown = _BEFORE + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools) + _AFTER
        if plain and plain[0]["role"] == "system":
            shown = f"{plain.pop(0)['content']}\n\n{shown}"
        plain.insert(0, {"role": "system", "content": shown})
    return plain


def _content(message: Mapping[str, Any]) -> str:
    calls = [
        f"{TOOL_CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END_TOOL_CALL}"
        for call in message.get("tool_calls", ())
    ]
    return "\n".join(filter(None, [message["content"], *calls]))
