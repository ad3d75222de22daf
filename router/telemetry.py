"""What the router tells OpenTelemetry: metrics and one span of each streamed request. Counts and times, never text.

Off, a request costs two comparisons. On, it costs about ten records at its end; nothing is done for a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glmserve.service.telemetry import Telemetry
from glmserve.service.tracing import parent_context, set_present, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
    from opentelemetry.trace import Span, Tracer

_SERVICE = "glmserve.inference.v1.InferenceService"
_OPERATIONS = {"Generate": "text_completion", "Chat": "chat"}
# The bounds that OpenTelemetry's conventions give for these three, and further ones for requests that wait in a queue.
_FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40)
_PER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """How a request ended. Seconds from receipt; `status`: the name of its gRPC status.

    `overload`: the limit that a request refused with RESOURCE_EXHAUSTED ran into.
    """

    method: str
    request_id: str
    status: str
    overload: str | None
    finish: str | None
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    submitted_s: float | None
    first_token_s: float | None
    total_s: float

    @property
    def seconds_per_token(self) -> float | None:
        """Of decoding, the first token apart. None: there was none."""
        if self.first_token_s is None or self.completion_tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.completion_tokens - 1)

    @property
    def is_refusal(self) -> bool:
        """It ended with an error and brought nothing."""
        return self.status not in ("OK", "CANCELLED") and not self.completion_tokens


class RouterTelemetry:
    """Used from the event loop; observables are read by the thread that is scraped."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._tracer = telemetry.tracer
        self._metrics = None if telemetry.meter is None else _Metrics(telemetry.meter)

    def observe(self, workers: Callable[[], int]) -> None:
        """`workers`: how many take requests now. Call once."""
        if self._metrics is not None:
            self._metrics.observe(workers)

    def begin(self, method: str, protocol: str, traceparent: str) -> RequestTrace | None:
        """A request has come, with its client's trace context or none (""). None: tracing is off."""
        if self._metrics is not None:
            self._metrics.in_flight += 1
        return None if self._tracer is None else RequestTrace(self._tracer, method, protocol, traceparent)

    def end(self, record: RequestRecord, trace: RequestTrace | None) -> None:
        """Its RPC has ended."""
        if self._metrics is not None:
            self._metrics.ended(record)
        if trace is not None:
            trace.end(record)


class RequestTrace:
    """The span of one request; the worker's become its children."""

    def __init__(self, tracer: Tracer, method: str, protocol: str, traceparent: str) -> None:
        from opentelemetry.trace import SpanKind  # noqa: PLC0415

        self._tracer = tracer
        self._protocol = protocol
        self._started_ns = time.time_ns()
        name = f"{_SERVICE}/{method}" if protocol == "grpc" else f"{protocol} {_OPERATIONS[method]}"
        self._span = tracer.start_span(name, parent_context(traceparent), SpanKind.SERVER, start_time=self._started_ns)

    @property
    def traceparent(self) -> str:
        """For the worker."""
        return traceparent_of(self._span)

    def end(self, record: RequestRecord) -> None:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415

        span = self._span
        if span.is_recording():
            set_present(span, _transport(record, self._protocol) | _attributes(record))
            if record.status not in ("OK", "CANCELLED"):
                span.set_status(StatusCode.ERROR, record.status)
            if record.submitted_s is not None:
                self._prepared(span, record.submitted_s)
            if record.first_token_s is not None:
                span.add_event("first_token", timestamp=self._at(record.first_token_s))
        span.end(self._at(record.total_s))

    def _prepared(self, span: Span, submitted_s: float) -> None:
        """The time in which the prompt was checked, rendered and tokenised."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415

        prepare = self._tracer.start_span("router.prepare", set_span_in_context(span), start_time=self._started_ns)
        prepare.end(self._at(submitted_s))

    def _at(self, seconds: float) -> int:
        return self._started_ns + int(seconds * 1e9)


def _transport(record: RequestRecord, protocol: str) -> dict[str, str | int | float | None]:
    """By OpenTelemetry's conventions. An RPC is only what came as one."""
    if protocol != "grpc":
        return {"network.protocol.name": protocol}
    return {
        "rpc.system": "grpc",
        "rpc.service": _SERVICE,
        "rpc.method": record.method,
        "rpc.response.status_code": record.status,
    }


def _attributes(record: RequestRecord) -> dict[str, str | int | float | None]:
    return {
        "error.type": None if record.status in ("OK", "CANCELLED") else record.status,
        "gen_ai.operation.name": _OPERATIONS[record.method],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "glm.cached_prompt_tokens": record.cached_prompt_tokens,
        "glm.request_id": record.request_id,
        "glm.finish_reason": record.finish,
    }


class _Metrics:
    """Names: gen_ai.server.* where OpenTelemetry has one, else glm.router.*. Prometheus adds the unit, or _total."""

    def __init__(self, meter: Meter) -> None:
        self.in_flight = 0
        self._meter = meter
        self._first = _histogram(
            meter, "time_to_first_token", _FIRST_TOKEN_BUCKETS, "From receipt to the first token, where there was one."
        )
        self._per_token = _histogram(
            meter, "time_per_output_token", _PER_TOKEN_BUCKETS, "Of decoding, the mean of a request."
        )
        self._duration = _histogram(meter, "request.duration", _DURATION_BUCKETS, "From receipt to the RPC's end.")
        self._tokens = meter.create_counter("glm.router.tokens", "{token}", "Of requests that have ended, by type.")
        self._refusals = meter.create_counter("glm.router.refusals", "{request}", "Errors before any token.")

    def observe(self, workers: Callable[[], int]) -> None:
        from opentelemetry.metrics import Observation  # noqa: PLC0415

        def gauge(name: str, unit: str, description: str, value: Callable[[], int]) -> None:
            def observed(_: CallbackOptions) -> Iterable[Observation]:
                return [Observation(value())]

            self._meter.create_observable_gauge(f"glm.router.{name}", [observed], unit, description)

        gauge("requests_in_flight", "{request}", "Streamed requests now.", lambda: self.in_flight)
        gauge("workers_serving", "{worker}", "Workers that take requests now.", workers)

    def ended(self, record: RequestRecord) -> None:
        self.in_flight -= 1
        operation = {"gen_ai.operation.name": _OPERATIONS[record.method]}
        self._duration.record(record.total_s, {**operation, "status": record.status})
        if record.first_token_s is not None:
            self._first.record(record.first_token_s, operation)
        if record.seconds_per_token is not None:
            self._per_token.record(record.seconds_per_token, operation)
        if record.is_refusal:
            self._refusals.add(1, {"reason": record.overload or record.status.lower()})
            return
        self._tokens.add(record.prompt_tokens, {"type": "input"})
        self._tokens.add(record.cached_prompt_tokens, {"type": "cached_input"})
        self._tokens.add(record.completion_tokens, {"type": "output"})


def _histogram(meter: Meter, name: str, buckets: Sequence[float], description: str) -> Histogram:
    return meter.create_histogram(
        f"gen_ai.server.{name}", "s", description, explicit_bucket_boundaries_advisory=list(buckets)
    )
