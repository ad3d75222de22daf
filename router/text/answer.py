"""The answer to a conversation: ids to content, reasoning and tool calls.

A tag that is a token of the tokeniser is known by its id: the same characters, spelled by other tokens, are text. Where
the tokeniser has no such token, the tag is looked for in the text. Which tags mean something depends on where they
stand; all others are text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from router.text.answer_parts import Content, Reasoning
from router.text.argument_types import ArgumentTypes
from router.text.call_sink import CallSink, new_call_id
from router.text.detokenizer import Detokenizer
from router.text.glm_call import GlmCall
from router.text.json_call import JsonCall
from router.text.reader import Piece
from router.text.reasoning import END_THINK, THINK, ReasoningStyle
from router.text.stop_strings import StopStrings
from router.text.tag_search import find_tag
from router.text.tool_calls import TOOL_CALL, ToolStyle, ToolSyntax


@dataclass(frozen=True)
class AnswerStyle:
    """What answers of a checkpoint may hold beside content. None: text like any other."""

    reasoning: ReasoningStyle | None = None
    tools: ToolStyle | None = None

    @property
    def tag_ids(self) -> dict[int, str]:
        """Tags that are tokens, by id."""
        given = [style.tag_ids for style in (self.reasoning, self.tools) if style is not None]
        return {token_id: tag for tag_ids in given for tag, token_id in tag_ids.items()}


@dataclass(frozen=True)
class AnswerPlan:
    """How to read one answer.

    `in_reasoning`: the prompt ends within the reasoning. `after_reasoning`: it ends with its end. `tools`: what calls
    are looked for; None: they are text. `single_call`: the answer ends with its first call. Stop strings are looked
    for in the content, beyond the first `min_tokens` ids.
    """

    in_reasoning: bool = False
    after_reasoning: bool = False
    tools: Mapping[str, ArgumentTypes] | None = None
    single_call: bool = False
    stops: Sequence[str] = ()
    min_tokens: int = 0


class AnswerReader:
    """A `router.text.reader.Reader` of one answer.

    Space around the reasoning and around tool calls is no part of the content. A call that is cut short before its name
    is complete is left out; one that is cut short later stays as it came, and is not counted as whole. A call of a
    known tool ends the reasoning.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        style: AnswerStyle,
        plan: AnswerPlan,
        new_call_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._detokenizer = detokenizer
        self._tags = style.tag_ids
        self._known = frozenset(self._tags.values())
        self._syntax = style.tools.syntax if style.tools is not None and plan.tools is not None else None
        self._tools = plan.tools or {}
        self._sink = CallSink(new_call_id)
        self._single_call = plan.single_call
        self._reasoning = Reasoning(calls=self._syntax is not None)
        self._content = Content(
            StopStrings(plan.stops),
            plan.min_tokens,
            thinks=style.reasoning is not None,
            calls=self._syntax is not None,
            after_reasoning=plan.after_reasoning,
        )
        self._state: Reasoning | Content | GlmCall | JsonCall = self._reasoning if plan.in_reasoning else self._content
        # The end of the text so far, if it may be the beginning of a tag.
        self._held = ""
        self.reasoning_tokens = 0
        # Of a call that began in the reasoning: how many calls had begun before it.
        self._begun_before: int | None = None

    @property
    def stop(self) -> str | None:
        return self._content.stops.matched

    @property
    def ended(self) -> bool:
        return self.stop is not None or (self._single_call and self._sink.whole > 0)

    @property
    def calls_whole(self) -> bool:
        return 0 < self._sink.begun == self._sink.whole

    def push(self, ids: Sequence[int]) -> int:
        for position, token_id in enumerate(ids):
            was_reasoning = self._reasons()
            self._read(token_id)
            self._content.exempt -= 1
            self.reasoning_tokens += was_reasoning or self._reasons()
            if self.ended:
                return position + 1
        return len(ids)

    def finish(self, *, stopped: bool) -> None:
        if not self.ended:
            self._feed(self._detokenizer.finish())
            self._release()
            if isinstance(self._state, GlmCall | JsonCall):
                rejected = self._state.finish(stopped=stopped)
                if rejected:
                    self._reject(rejected)
            if stopped and self._state is self._reasoning and self._content.empty and not self._sink.begun:
                # It ended its turn and never its reasoning: most likely it did not think, but answered at once.
                self._state = self._content
                self._content.plain(self._reasoning.whole())
        if self._state is self._content:
            self._content.finish()

    def take(self) -> Piece:
        return Piece(self._content.take(), self._reasoning.take(), self._sink.take())

    def _read(self, token_id: int) -> None:
        tag = self._tags.get(token_id)
        if tag is None:
            self._feed(self._detokenizer.push((token_id,)))
            return
        self._feed(self._detokenizer.finish())
        self._release()
        if self._state.accepts(tag):
            self._on_tag(tag)
        else:
            self._feed(tag)

    def _feed(self, text: str) -> None:
        while text and not self.ended:
            spelled = self._state.tags if not self._known else [t for t in self._state.tags if t not in self._known]
            text, self._held = self._held + text, ""
            if not spelled:
                text = self._state.text(text)
                continue
            start, tag = find_tag(text, spelled)
            if start > 0:  # other tags may count after it
                text = self._state.text(text[:start]) + text[start:]
            elif tag is None:
                self._held = text
                return
            else:
                self._on_tag(tag)
                text = text[len(tag) :]

    def _release(self) -> None:
        """What was held back is no tag."""
        held, self._held = self._held, ""
        while held:
            held = self._state.text(held)

    def _on_tag(self, tag: str) -> None:
        state = self._state
        if isinstance(state, GlmCall | JsonCall):
            end = state.tag(tag)
            if end is not None and end.rejected is not None:
                self._reject(end.rejected)
            elif end is not None:
                self._state = self._content
                self._content.resume()
        elif tag == THINK:
            self._content.pause()
            self._state = self._reasoning
        elif tag == END_THINK:
            self._content.resume()
            self._state = self._content
        else:
            self._content.pause()
            self._begun_before = self._sink.begun if state is self._reasoning else None
            self._state = self._new_call(known_only=state is self._reasoning)

    def _reject(self, text: str) -> None:
        """What seemed a call is text, `text`, where it began."""
        if self._reasons():
            self._state = self._reasoning
            self._reasoning.text(TOOL_CALL + text)
        else:
            self._state = self._content
            self._content.plain(TOOL_CALL + text)
        self._begun_before = None

    def _reasons(self) -> bool:
        """This is reasoning, or may turn out to be."""
        return self._state is self._reasoning or self._begun_before == self._sink.begun

    def _new_call(self, *, known_only: bool) -> GlmCall | JsonCall:
        if self._syntax is ToolSyntax.JSON_LINE:
            return JsonCall(self._sink, self._tools if known_only else None)
        return GlmCall(self._sink, self._tools, known_only=known_only)
