"""A request's trace over both hops, and the metrics of both services, from real processes."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from deploy.local import LocalOptions, local_cluster
from deploy.watch import Watch
from tests.e2e.client import connect, request

TRACE = "0123456789abcdef0123456789abcdef"
CLIENT_SPAN = "00f067aa0ba902b7"
ENGINE_SPANS = ("engine.queue", "engine.prefill", "engine.decode")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector. `spans`: (service, span) by name, of the trace under test."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, Any]] = {}

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if span.trace_id.hex() == TRACE:
                        self.spans[span.name] = (names["service.name"], span)
        return trace_service_pb2.ExportTraceServiceResponse()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


async def test_a_request_is_traced_over_both_hops_and_measured(model_dir: Path) -> None:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker_metrics, router_metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))

    def args(metrics: str) -> list[str]:
        return ["--otlp-endpoint", endpoint, "--trace-ratio", "0", "--metrics-listen", metrics]

    options = LocalOptions(model_dir, worker_args=args(worker_metrics), router_args=args(router_metrics))
    context = local_cluster(options, report=lambda _: None)
    cluster = await asyncio.to_thread(context.__enter__)
    try:
        async with connect(cluster.router) as client:
            call = client.Generate(
                request("The capital of France is", max_tokens=6, ignore_eos=True),
                metadata=(("traceparent", f"00-{TRACE}-{CLIENT_SPAN}-01"),),
            )
            async for _ in call:
                pass
        seen = {name: await asyncio.to_thread(scrape, name) for name in (worker_metrics, router_metrics)}
        with Watch(cluster.workers, [router_metrics]) as watch:
            await asyncio.to_thread(watch.look)
        errors = [None if subject.last is None else subject.last.error for subject in watch.subjects]
    finally:
        # Both send what they have when they stop.
        await asyncio.to_thread(context.__exit__, None, None, None)
        await server.stop(None)

    assert errors == [None, None]
    assert 'glm_worker_request_duration_seconds_count{reason="length"}' in seen[worker_metrics]
    assert 'glm_router_tokens_total{type="output"} 6.0' in seen[router_metrics]
    check_tree(collector.spans)


def check_tree(spans: dict[str, tuple[str, Any]]) -> None:
    """client > router > worker, each within its parent's time; the worker's parts follow one another."""
    service, router = spans["glmserve.inference.v1.InferenceService/Generate"]
    assert (service, router.parent_span_id.hex()) == ("glmserve-router", CLIENT_SPAN)
    service, engine = spans["engine.request"]
    assert (service, engine.parent_span_id) == ("glmserve-worker", router.span_id)
    parts = [spans[name][1] for name in ENGINE_SPANS]
    assert {part.parent_span_id for part in parts} == {engine.span_id}
    edges = [(part.start_time_unix_nano, part.end_time_unix_nano) for part in parts]
    assert [end for _, end in edges[:-1]] == [start for start, _ in edges[1:]]
    assert router.start_time_unix_nano <= engine.start_time_unix_nano
    assert engine.end_time_unix_nano <= router.end_time_unix_nano
    assert spans["router.prepare"][1].parent_span_id == router.span_id
    texts = [attribute.value.string_value for _, span in spans.values() for attribute in span.attributes]
    assert not [text for text in texts if "France" in text]
