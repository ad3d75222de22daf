"""Telemetry into memory: the spans and the metrics of a service under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from glmserve.service.telemetry import Telemetry


@dataclass
class Recorded:
    """`telemetry` is for the service; the rest is what it said."""

    telemetry: Telemetry
    registry: CollectorRegistry
    exporter: InMemorySpanExporter

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        """The spans that have ended, by name."""
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def names(self) -> set[str]:
        """Of all samples that a scrape would show."""
        return {sample.name for metric in self.registry.collect() for sample in metric.samples}

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@contextmanager
def recorded() -> Iterator[Recorded]:
    registry = CollectorRegistry()
    exporter = InMemorySpanExporter()
    meters = MeterProvider(
        [PrometheusMetricReader(scope_info_enabled=False, registry=registry)], shutdown_on_exit=False
    )
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    try:
        yield Recorded(Telemetry(tracers.get_tracer("test"), meters.get_meter("test")), registry, exporter)
    finally:
        tracers.shutdown()
        meters.shutdown()


def parent_id(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
