"""W3C trace context and spans that are made when a request has ended, from the times that were noted on its way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

TRACEPARENT_KEY = "traceparent"
# Version 00, and later ones as far as they begin alike: only these may have more at the end.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id_of(traceparent: str) -> str | None:
    """The trace id, 32 hexadecimal digits; None if it is no W3C traceparent, which then is to be ignored."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return None if found is None or (found[1] == "00" and found[3]) else found[2]


def parent_context(traceparent: str) -> Context:
    """What a span needs to become a child of a remote one. Empty or invalid: of none."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

    return TraceContextTextMapPropagator().extract({TRACEPARENT_KEY: traceparent})


def traceparent_of(span: Span) -> str:
    """The header that makes others children of `span`."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def set_present(span: Span, attributes: Mapping[str, str | int | float | None]) -> None:
    """Set those attributes that have a value."""
    span.set_attributes({key: value for key, value in attributes.items() if value is not None})
