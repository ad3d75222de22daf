"""OpenTelemetry, if asked for: spans to an OTLP collector, metrics on a Prometheus endpoint.

Off, nothing of it is imported and nothing runs. On, spans are exported from a thread with a bounded queue, and metrics
are computed when they are scraped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from pydantic import Field

from glmserve.service.settings import ServiceSettings

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry

# A collector that is away must not hold up a shutdown.
_EXPORT_TIMEOUT_S = 2


class TelemetrySettings(ServiceSettings):
    """What a service's settings say of telemetry."""

    metrics_listen: str | None = Field(
        None,
        pattern=r"^.+:\d{1,5}$",
        description="Prometheus endpoint, HOST:PORT, on /metrics; port 0: any free one; unset: none. "
        "Plain HTTP without authentication: a loopback or cluster-internal address.",
    )
    otlp_endpoint: str | None = Field(
        None, pattern=r"^https?://.+$", description="OpenTelemetry collector for spans (OTLP over gRPC); unset: none."
    )
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests to trace of those that come without a trace context."
    )


@dataclass(frozen=True)
class Telemetry:
    """What is on. `registry`: what the meter's figures are read from. `metrics_address`: HOST:PORT really bound."""

    tracer: Tracer | None = None
    meter: Meter | None = None
    registry: CollectorRegistry | None = None
    metrics_address: str | None = None


@contextlib.contextmanager
def running_telemetry(service: str, settings: TelemetrySettings, *, shows_metrics: bool = False) -> Iterator[Telemetry]:
    """Telemetry of this process for the time of the block; at its end the last spans are sent.

    `shows_metrics`: the service has a place of its own to show them.
    Raises OSError: the metrics address cannot be bound.
    """
    with contextlib.ExitStack() as stack:
        tracer = meter = registry = address = None
        if settings.otlp_endpoint is not None:
            tracer = stack.enter_context(_tracer(service, settings.otlp_endpoint, settings.trace_ratio))
        if shows_metrics or settings.metrics_listen is not None:
            meter, registry = stack.enter_context(_meter(service))
        if registry is not None and settings.metrics_listen is not None:
            address = stack.enter_context(_endpoint(registry, settings.metrics_listen))
        yield Telemetry(tracer, meter, registry, address)


@contextlib.contextmanager
def _tracer(service: str, endpoint: str, ratio: float) -> Iterator[Tracer]:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased  # noqa: PLC0415

    resource = Resource.create({"service.name": f"glmserve-{service}", "service.version": version("glmserve")})
    provider = TracerProvider(ParentBased(TraceIdRatioBased(ratio)), resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=_EXPORT_TIMEOUT_S * 1000))
    try:
        yield provider.get_tracer("glmserve")
    finally:
        provider.shutdown()


@contextlib.contextmanager
def _meter(service: str) -> Iterator[tuple[Meter, CollectorRegistry]]:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader  # noqa: PLC0415
    from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from prometheus_client import CollectorRegistry  # noqa: PLC0415
    from prometheus_client.process_collector import ProcessCollector  # noqa: PLC0415

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    reader = PrometheusMetricReader(scope_info_enabled=False, registry=registry)
    resource = Resource.create({"service.name": f"glmserve-{service}", "service.version": version("glmserve")})
    provider = MeterProvider([reader], resource, shutdown_on_exit=False)
    try:
        yield provider.get_meter("glmserve"), registry
    finally:
        provider.shutdown()


@contextlib.contextmanager
def _endpoint(registry: CollectorRegistry, listen: str) -> Iterator[str]:
    from prometheus_client import start_http_server  # noqa: PLC0415

    host, _, port = listen.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host, registry)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen for metrics on {listen}: {error}") from None
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
