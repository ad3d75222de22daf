"""Telemetry of a process: off it costs nothing, on it can be asked, wrong settings are named."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request

import pytest
from pydantic import ValidationError

from glmserve.service.telemetry import TelemetrySettings, running_telemetry
from glmserve.service.tracing import trace_id_of

TRACE = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("module", ["router.server", "engine_worker.server"])
def test_a_service_without_telemetry_does_not_import_it(module: str) -> None:
    found = "[name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus'))]"
    code = f"import sys, {module}; print({found})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_off_there_is_neither_tracer_nor_meter() -> None:
    with running_telemetry("router", TelemetrySettings()) as telemetry:
        assert (telemetry.tracer, telemetry.meter, telemetry.metrics_address) == (None, None, None)


def test_the_endpoint_is_there_for_the_time_of_the_block() -> None:
    with running_telemetry("router", TelemetrySettings(metrics_listen="127.0.0.1:0")) as telemetry:
        assert telemetry.meter is not None
        telemetry.meter.create_counter("glm.test.things", "{thing}").add(3)
        with urllib.request.urlopen(f"http://{telemetry.metrics_address}/metrics") as reply:
            text = reply.read().decode()
    assert "\nglm_test_things_total 3.0\n" in text
    assert 'service_name="glmserve-router"' in text
    assert "process_open_fds" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{telemetry.metrics_address}/metrics")


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(OSError, match=f"cannot listen for metrics on {address}"),
            running_telemetry("router", TelemetrySettings(metrics_listen=address)),
        ):
            pass


def test_a_collector_that_is_away_keeps_nobody_from_stopping() -> None:
    with running_telemetry("router", TelemetrySettings(otlp_endpoint="http://127.0.0.1:1")) as telemetry:
        assert telemetry.tracer is not None
        telemetry.tracer.start_span("lost").end()


@pytest.mark.parametrize(
    ("name", "value"),
    [("metrics_listen", "9464"), ("otlp_endpoint", "host:4317"), ("trace_ratio", 1.5), ("trace_ratio", float("nan"))],
)
def test_a_wrong_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        TelemetrySettings.model_validate({name: value})
    assert [error["loc"] for error in caught.value.errors()] == [(name,)]


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"cc-{TRACE}-00f067aa0ba902b7-01-what-comes-later", TRACE),
        (f"00-{TRACE.upper()}-00f067aa0ba902b7-01", None),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"ff-{TRACE}-00f067aa0ba902b7-01", None),
        (f"00-{TRACE}-00f067aa0ba902b7", None),
        (f"00-{TRACE}-00f067aa0ba902b7-01-more", None),
        ("", None),
    ],
)
def test_a_trace_id_is_found_only_in_what_the_standard_allows(traceparent: str, trace_id: str | None) -> None:
    assert trace_id_of(traceparent) == trace_id
