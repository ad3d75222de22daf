"""How a checkpoint writes tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
ARG_KEY, END_ARG_KEY = "<arg_key>", "</arg_key>"
ARG_VALUE, END_ARG_VALUE = "<arg_value>", "</arg_value>"
TAGS = (TOOL_CALL, END_TOOL_CALL, ARG_KEY, END_ARG_KEY, ARG_VALUE, END_ARG_VALUE)


class ToolSyntax(Enum):
    """What stands between <tool_call> and </tool_call>. Arguments of GLM's: strings as they are, all else as JSON."""

    # GLM-4.5: NAME, and for each argument <arg_key>K</arg_key> and <arg_value>V</arg_value>, each on a line of its own.
    GLM_LINES = "glm_lines"
    # GLM-4.7: the same without line ends.
    GLM_COMPACT = "glm_compact"
    # Hermes: one line with the JSON object {"name": NAME, "arguments": {K: V, ...}}.
    JSON_LINE = "json_line"


@dataclass(frozen=True)
class ToolStyle:
    """`tag_ids`: those of TAGS that are one token of the tokeniser, by which alone they are then known."""

    syntax: ToolSyntax
    tag_ids: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CallEnd:
    """`rejected`: the text after <tool_call>, if it turned out to be no call."""

    rejected: str | None = None
