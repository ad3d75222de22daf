"""The checkpoint's chat template, rendered as transformers' `apply_chat_template` does, without importing transformers.

The template is code from outside: it runs in jinja2's immutable sandbox and sees plain data only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import CheckpointError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# What a template's own expressions may raise.
_FAULTS = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError)


class TemplateRefusalError(ValueError):
    """The template refuses the conversation: its own words."""


class ChatTemplate:
    """Immutable once loaded.

    `variables`: names that the template looks up and does not define: what it can be told.
    """

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        """`named_tokens`: bos_token, eos_token, ... as templates use them. Raises CheckpointError: a syntax error."""
        self._named_tokens = dict(named_tokens)
        self._source = source
        environment = _environment()
        try:
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from None

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """chat_template.jinja, else "chat_template" of tokenizer_config.json; None: the checkpoint has no template."""
        config = _read_tokenizer_config(directory / "tokenizer_config.json")
        path = directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(f"{directory}/tokenizer_config.json: chat_template is not a string")
        return cls(source, _named_tokens(config))

    def mentions(self, text: str) -> bool:
        """Whether `text` stands in the template."""
        return text in self._source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that asks for the next assistant message.

        `messages`: {"role": ..., "content": ...} and whatever else the template looks for, plain data. `tools`: as of
        OpenAI's API. `options`: further variables; what is not in there is undefined, so that the template's own
        default holds. Raises TemplateRefusalError: the template does not take this conversation.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._named_tokens,
                **(options or {}),
            )
        except (jinja2.TemplateError, *_FAULTS) as error:
            raise TemplateRefusalError(str(error)) from None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscore names, which lead to interpreter internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


class _Dict:
    """`dict` as templates may use it: made, but not reached through."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not store {name!r} in a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _read_tokenizer_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return config


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens
