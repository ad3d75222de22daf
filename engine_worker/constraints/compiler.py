"""From a constraint's text to a matcher for this model's tokeniser."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_worker.constraints.matcher import RequestConstraint, error_line
from glmserve.engine.v1 import engine_pb2
from glmserve.service.deep_thread import deep_thread

MAX_TEXT_BYTES = 1 << 20
_CACHED = 32
# llguidance's reasons for a matcher that cannot begin.
_NO_TEXT = ("NoExtension", "NoExtensionBias")
# Of one mask, about 5 ms of lexer and parser each; of the first, which the compiler computes, 10 times as much.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
# Between the tokens of a JSON value, as pretty printers write it: without a bound a model can write spaces for ever.
_JSON_SPACE = r"[ \t]{1,24}|\r?\n[ \t]{0,24}"


class ConstraintError(Exception):
    """`field`: of the constraint. The text is llguidance's."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ConstraintCompiler:
    """Compiles on one thread of its own, in the order of the calls. Matchers of the latest texts are kept."""

    def __init__(self, model: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """`model`: with its tokenizer.json, which is read when the first constraint comes."""
        self._path = model / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._tokenizer: LLTokenizer | None = None
        self._matchers: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._threads = deep_thread("constraints")

    def compile(
        self, constraint: engine_pb2.Constraint, min_tokens: int, generated: list[int]
    ) -> Future[RequestConstraint]:
        """A constraint that has taken in the tokens `generated` before. Raises ConstraintError."""
        return self._threads.submit(self._compile, constraint, min_tokens, generated)

    def _compile(self, constraint: engine_pb2.Constraint, min_tokens: int, generated: list[int]) -> RequestConstraint:
        kind = constraint.WhichOneof("kind")
        if kind is None:
            raise ConstraintError("", "is empty, allowed: json_schema, regex or lark")
        text: str = getattr(constraint, kind)
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise ConstraintError(kind, f"is {len(text.encode())} bytes long, allowed: at most {MAX_TEXT_BYTES}")
        begin_after = constraint.begin_after_token_id if constraint.HasField("begin_after_token_id") else None
        made = RequestConstraint(self._matcher(kind, text), begin_after, min_tokens, self._eos_ids)
        if error := made.advance(generated):
            raise ConstraintError(kind, f"does not allow the tokens generated before: {error}")
        return made

    def _matcher(self, kind: str, text: str) -> LLMatcher:
        """At its beginning; the caller's own."""
        key = (kind, text)
        matcher = self._matchers.get(key)
        if matcher is None:
            matcher = self._matchers[key] = self._build(kind, text)
            if len(self._matchers) > _CACHED:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(key)
        return matcher.deep_copy()

    def _build(self, kind: str, text: str) -> LLMatcher:
        try:
            matcher = LLMatcher(self._load_tokenizer(kind), _grammar(kind, text), log_level=0, limits=_LIMITS)
        except ConstraintError:
            raise
        except BaseException as error:  # ValueError: not JSON; a panic of the binding is no Exception
            raise ConstraintError(kind, str(error)) from None
        if not matcher.is_error():
            matcher.compute_bitmask()  # the lexer is built for the first mask: here it delays nobody's step
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            line = error_line(matcher)
            raise ConstraintError(kind, "no text matches it" if line in ("", *_NO_TEXT) else line)
        return matcher

    def _load_tokenizer(self, kind: str) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._path.is_file():
                raise ConstraintError(kind, f"cannot be followed: the checkpoint has no {self._path.name}")
            self._tokenizer = LLTokenizer(str(self._path), n_vocab=self._vocab_size, eos_token=list(self._eos_ids))
        return self._tokenizer


def _grammar(kind: str, text: str) -> str:
    if kind == "json_schema":
        text = "{}" if text.strip() == "true" else text  # llguidance wants an object to put the defaults into
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _JSON_SPACE})
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
