"""What answers of a checkpoint look like, found out from its chat template and tokeniser, never from its name."""

from __future__ import annotations

import re

from router.text.answer import AnswerStyle
from router.text.chat_template import ChatTemplate, TemplateRefusalError
from router.text.reasoning import END_THINK, THINK, ReasoningStyle
from router.text.tokenizer import TextTokenizer
from router.text.tool_calls import TAGS, ToolStyle, ToolSyntax

_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe"
_FUNCTION = {
    "name": _NAME,
    "description": "",
    "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
}
_CALL = {"id": "call_0", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
_CONVERSATION = (
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "!", "tool_call_id": "call_0"},
)
# How a call in the history looks, and so how the model writes one.
_RENDERED = {
    ToolSyntax.GLM_LINES: rf"<tool_call>{_NAME}\n<arg_key>{_KEY}</arg_key>\s*<arg_value>{_VALUE}</arg_value>\s*</tool",
    ToolSyntax.GLM_COMPACT: rf"<tool_call>{_NAME}<arg_key>{_KEY}</arg_key><arg_value>{_VALUE}</arg_value></tool",
    ToolSyntax.JSON_LINE: rf'<tool_call>\s*{{"name": *"{_NAME}", *"(arguments|parameters)": *{{"{_KEY}": *"{_VALUE}"}}',
}


def answer_style(template: ChatTemplate | None, tokenizer: TextTokenizer) -> AnswerStyle:
    """`template` None: nothing but content. A template that shows no tools gets them from `router.text.tool_prompt`."""
    if template is None:
        return AnswerStyle()
    reasoning = None
    if template.mentions(END_THINK):
        reasoning = ReasoningStyle(_ids(tokenizer, (THINK, END_THINK)))
    syntax = _tool_syntax(template) if "tools" in template.variables else ToolSyntax.JSON_LINE
    return AnswerStyle(reasoning, None if syntax is None else ToolStyle(syntax, _ids(tokenizer, TAGS)))


def _ids(tokenizer: TextTokenizer, tags: tuple[str, ...]) -> dict[str, int]:
    return {tag: tokenizer.added_ids[tag] for tag in tags if tag in tokenizer.added_ids}


def _tool_syntax(template: ChatTemplate) -> ToolSyntax | None:
    """None: not one that is known here."""
    try:
        text = template.render(_CONVERSATION, [{"type": "function", "function": _FUNCTION}])
    except TemplateRefusalError:
        return None
    return next((syntax for syntax, pattern in _RENDERED.items() if re.search(pattern, text)), None)
