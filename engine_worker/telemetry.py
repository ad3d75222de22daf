"""What the worker tells OpenTelemetry: metrics of steps and requests, spans of requests. Counts and times, never ids of
tokens.

Off, each call is one comparison. On, a step costs three records and a request about ten, on the service's event loop:
nothing is done for a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from engine_worker.expert_loads import ExpertLoads
from engine_worker.runtime.loop import StepStats
from engine_worker.scheduler.request import Finish, Reason, RequestKey
from glmserve.engine.v1 import engine_pb2
from glmserve.service.telemetry import Telemetry
from glmserve.service.tracing import parent_context

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
    from opentelemetry.trace import Tracer

# Steps: 1 ms (a small model on a GPU) to 10 s (a long prefill on a CPU), a factor of about 2 between bounds.
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.3, 2.6, 5, 10)
# Waiting and whole requests: to minutes, because a queue under overload is what they are looked at for.
_REQUEST_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
# Powers of two, as the CUDA graphs of decode steps.
_SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_COUNTERS = ("steps", "generated_tokens", "prompt_tokens", "cached_prompt_tokens", "preemptions")
_GAUGES = ("running_requests", "waiting_requests", "waiting_prompt_tokens")
_FAILURES = (Reason.TIMEOUT, Reason.UNAVAILABLE, Reason.NUMERICAL_ERROR)


class WorkerTelemetry:
    """Used from the service's event loop; observables are read by the thread that is scraped."""

    def __init__(self, telemetry: Telemetry, *, each_expert: bool = False) -> None:
        """With `each_expert` there is a counter for each expert of each layer."""
        self._each_expert = each_expert
        self._metrics = None if telemetry.meter is None else _Metrics(telemetry.meter)
        self._spans = None if telemetry.tracer is None else _Spans(telemetry.tracer)

    def observe(self, load: Callable[[], engine_pb2.Load]) -> None:
        """Take the totals and levels of `load` whenever they are asked for. Call once."""
        if self._metrics is not None:
            self._metrics.observe(load)

    def observe_experts(self, loads: Callable[[], ExpertLoads | None]) -> None:
        """Take the newest reading of the experts' loads whenever it is asked for. Call once."""
        if self._metrics is not None:
            self._metrics.observe_experts(loads, each=self._each_expert)

    def stepped(self, steps: Sequence[StepStats]) -> None:
        """Steps have been collected."""
        if self._metrics is not None:
            for step in steps:
                self._metrics.stepped(step)

    def accepted(self, key: RequestKey, submit: engine_pb2.Submit) -> None:
        """The request will have a finish."""
        if self._spans is not None:
            self._spans.accepted(key, submit.traceparent)

    def rejected(self, rejection: engine_pb2.Rejection) -> None:
        """The submit was refused."""
        if self._metrics is not None:
            self._metrics.rejected(rejection)

    def finished(self, finish: Finish) -> None:
        """The request has ended."""
        if self._metrics is not None:
            self._metrics.finished(finish)
        if self._spans is not None:
            self._spans.finished(finish)


class _Metrics:
    """Names: glm.worker.*, which Prometheus shows as glm_worker_*, with the unit and, for counters, _total."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._step = _histogram(meter, "step.duration", "s", _STEP_BUCKETS, "Time of the device for one step.")
        self._sequences = _histogram(meter, "step.sequences", "{sequence}", _SEQUENCE_BUCKETS, "Sequences of a step.")
        self._gap = _histogram(
            meter, "inter_token_latency", "s", _STEP_BUCKETS, "Time between the tokens of a request, once a step."
        )
        self._queue = _histogram(meter, "queue.duration", "s", _REQUEST_BUCKETS, "From receipt to the first step.")
        self._first = _histogram(
            meter, "time_to_first_token", "s", _REQUEST_BUCKETS, "From receipt to the first token, where there was one."
        )
        self._request = _histogram(meter, "request.duration", "s", _REQUEST_BUCKETS, "From receipt to the finish.")
        self._rejections = meter.create_counter("glm.worker.rejections", "{request}", "Submits that were not accepted.")

    def observe(self, load: Callable[[], engine_pb2.Load]) -> None:
        from opentelemetry.metrics import Observation  # noqa: PLC0415

        def field(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
            return lambda _: [Observation(getattr(load(), name))]

        def pages(_: CallbackOptions) -> Iterable[Observation]:
            now = load()
            held = now.total_pages - now.free_pages - now.cached_pages
            for state, count in (("free", now.free_pages), ("cached", now.cached_pages), ("held", held)):
                yield Observation(count, {"state": state})

        for name in _COUNTERS:
            unit = "{token}" if name.endswith("tokens") else f"{{{name[:-1]}}}"
            self._meter.create_observable_counter(f"glm.worker.{name}", [field(name)], unit, "Since start.")
        for name in _GAUGES:
            self._meter.create_observable_gauge(f"glm.worker.{name}", [field(name)], description="Now.")
        self._meter.create_observable_gauge("glm.worker.kv_pages", [pages], "{page}", "KV pages by state.")

    def observe_experts(self, loads: Callable[[], ExpertLoads | None], *, each: bool) -> None:
        from opentelemetry.metrics import Observation  # noqa: PLC0415

        def imbalance(_: CallbackOptions) -> Iterable[Observation]:
            if (now := loads()) is not None:
                for index, layer in enumerate(now.layers):
                    yield Observation(now.recent_experts[index], {"layer": layer, "among": "experts"})
                    yield Observation(now.recent_groups[index], {"layer": layer, "among": "ranks"})

        def of_groups(_: CallbackOptions) -> Iterable[Observation]:
            if (now := loads()) is not None:
                for group, tokens in enumerate(now.groups.sum(axis=0).tolist()):
                    yield Observation(tokens, {"group": group})

        def of_experts(_: CallbackOptions) -> Iterable[Observation]:
            if (now := loads()) is not None:
                for layer, counts in zip(now.layers, now.experts.tolist(), strict=True):
                    for expert, tokens in enumerate(counts):
                        yield Observation(tokens, {"layer": layer, "expert": expert})

        gauge = "Busiest over mean, of the last reading."
        self._meter.create_observable_gauge("glm.worker.expert_imbalance", [imbalance], description=gauge)
        self._meter.create_observable_counter(
            "glm.worker.expert_group_tokens", [of_groups], "{token}", "Given to the experts of a group of ranks."
        )
        if each:
            self._meter.create_observable_counter(
                "glm.worker.expert_tokens", [of_experts], "{token}", "Given to an expert."
            )

    def stepped(self, step: StepStats) -> None:
        attributes = {"phase": _phase(step)}
        self._step.record(step.device_s, attributes)
        self._sequences.record(step.sequences, attributes)
        if step.decodes:
            self._gap.record(step.gap_s)

    def rejected(self, rejection: engine_pb2.Rejection) -> None:
        name = engine_pb2.RejectionReason.Name(rejection.reason)
        self._rejections.add(1, {"reason": name.removeprefix("REJECTION_REASON_").lower()})

    def finished(self, finish: Finish) -> None:
        usage = finish.usage
        self._queue.record(usage.queue_s)
        if usage.completion_tokens:
            self._first.record(usage.first_token_s)
        self._request.record(usage.total_s, {"reason": finish.reason.name.lower()})


def _histogram(meter: Meter, name: str, unit: str, buckets: Sequence[float], description: str) -> Histogram:
    return meter.create_histogram(
        f"glm.worker.{name}", unit, description, explicit_bucket_boundaries_advisory=list(buckets)
    )


def _phase(step: StepStats) -> str:
    if not step.decodes:
        return "prefill"
    return "decode" if step.decodes == step.sequences else "mixed"


class _Spans:
    """A request's spans are made at its end: engine.request, and within it engine.queue, .prefill and .decode."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._parents: dict[RequestKey, str] = {}

    def accepted(self, key: RequestKey, traceparent: str) -> None:
        self._parents[key] = traceparent

    def finished(self, finish: Finish) -> None:
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context  # noqa: PLC0415

        usage = finish.usage
        end = time.time_ns()
        start = end - int(usage.total_s * 1e9)
        started = start + int(usage.queue_s * 1e9)
        first = start + int(usage.first_token_s * 1e9)
        parent = parent_context(self._parents.pop(finish.key, ""))
        request = self._tracer.start_span("engine.request", parent, SpanKind.SERVER, start_time=start)
        if request.is_recording():
            request.set_attributes(
                {
                    "gen_ai.usage.input_tokens": usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": usage.completion_tokens,
                    "gen_ai.response.finish_reasons": [finish.reason.name.lower()],
                    "glm.cached_prompt_tokens": usage.cached_prompt_tokens,
                    "glm.preemptions": usage.preemptions,
                }
            )
            if finish.reason in _FAILURES:
                request.set_status(StatusCode.ERROR, finish.reason.name.lower())
            within = set_span_in_context(request)
            for name, begin, until in (("queue", start, started), ("prefill", started, first), ("decode", first, end)):
                if begin < until:
                    self._tracer.start_span(f"engine.{name}", within, start_time=begin).end(until)
        request.end(end)
