"""CPU time that reading an answer costs a token, microseconds: `python -m tests.bench.answer`. Best of 20."""

from __future__ import annotations

import time

from router.text.answer import AnswerPlan, AnswerReader
from router.text.detokenizer import Detokenizer
from router.text.tool_calls import ToolSyntax
from tests.unit.answer_harness import TOOLS, encode, style, tokenizer
from tests.unit.router_harness import byte_ids

_WORDS = "The quick brown fox jumps over the lazy dog. " * 40
_ANSWERS = {
    "content": f"</think>{_WORDS}",
    "reasoning": f"{_WORDS}</think>Yes",
    "string argument": f"</think><tool_call>write<arg_key>text</arg_key><arg_value>{_WORDS}</arg_value></tool_call>",
    "object argument": "</think><tool_call>plan<arg_key>options</arg_key><arg_value>"
    f'{{"a": "{_WORDS}"}}</arg_value></tool_call>',
}


def main() -> None:
    """Print a line for each kind of answer."""
    cases = [(name, ToolSyntax.GLM_COMPACT, True, encode(text)) for name, text in _ANSWERS.items()]
    cases += [
        (f"{name}, tags spelled", ToolSyntax.GLM_COMPACT, False, byte_ids(t.encode())) for name, t in _ANSWERS.items()
    ]
    json_call = f'</think><tool_call>{{"name": "write", "arguments": {{"text": "{_WORDS}"}}}}</tool_call>'
    cases.append(("JSON call", ToolSyntax.JSON_LINE, True, encode(json_call)))
    for name, syntax, tags, ids in cases:
        best = min(_seconds(syntax, tags, ids) for _ in range(20))
        print(f"{name:32} {best / len(ids) * 1e6:5.2f} us  ({len(ids)} tokens)")


def _seconds(syntax: ToolSyntax, tags: bool, ids: list[int]) -> float:
    reader = AnswerReader(
        Detokenizer(tokenizer(tags=tags)), style(syntax, tags=tags), AnswerPlan(in_reasoning=True, tools=TOOLS)
    )
    started = time.process_time()
    for token_id in ids:
        reader.push((token_id,))
        reader.take()
    reader.finish(stopped=True)
    return time.process_time() - started


if __name__ == "__main__":
    main()
