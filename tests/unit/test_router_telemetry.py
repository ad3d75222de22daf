"""What the router tells of requests, and what it passes on of a client's trace."""

from __future__ import annotations

import grpc
import pytest
from opentelemetry.trace import SpanKind, StatusCode
from structlog.testing import capture_logs

from glmserve.inference.v1 import inference_pb2
from glmserve.service.tracing import trace_id_of
from tests.unit.router_harness import bench, encode
from tests.unit.telemetry_harness import attributes, parent_id, recorded

TRACE = "0123456789abcdef0123456789abcdef"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SPAN = "glmserve.inference.v1.InferenceService/Generate"


def request(prompt: str = "The capital") -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(prompt=prompt)


async def test_a_request_is_counted_and_its_span_joins_client_and_worker() -> None:
    with recorded() as seen:
        async with bench(telemetry=seen.telemetry) as b:
            call = b.client.Generate(request(), metadata=(("traceparent", PARENT), ("x-request-id", "r-1")))
            submit = await b.worker.submits.get()
            assert seen.value("glm_router_requests_in_flight") == 1
            assert seen.value("glm_router_workers_serving") == 1
            usage = {"prompt_tokens": 2, "cached_prompt_tokens": 1}
            b.worker.tokens(submit.request_id, encode(" of"))
            await call.read()
            b.worker.finish(submit.request_id, encode(" France is"), usage=usage)
            while await call.read() is not grpc.aio.EOF:
                pass
        span = seen.spans[SPAN]
        assert span.kind is SpanKind.SERVER
        assert f"{span.context.trace_id:032x}" == TRACE
        assert parent_id(span) == 0x00F067AA0BA902B7
        assert submit.traceparent == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert submit.trace_id == TRACE
        assert parent_id(seen.spans["router.prepare"]) == span.context.span_id
        assert [event.name for event in span.events] == ["first_token"]
        output = len(encode(" of")) + len(encode(" France is"))
        found = attributes(span)
        assert found["glm.request_id"] == "r-1"
        assert (found["rpc.system"], found["rpc.response.status_code"]) == ("grpc", "OK")
        assert found["gen_ai.usage.input_tokens"] == len(encode("The capital"))
        assert found["gen_ai.usage.output_tokens"] == output
        assert found["glm.finish_reason"] == "length"
        assert "The capital" not in str(found)
        operation = {"gen_ai_operation_name": "text_completion"}
        assert seen.value("gen_ai_server_request_duration_seconds_count", status="OK", **operation) == 1
        assert seen.value("gen_ai_server_time_to_first_token_seconds_count", **operation) == 1
        assert seen.value("gen_ai_server_time_per_output_token_seconds_count", **operation) == 1
        assert seen.value("glm_router_tokens_total", type="output") == output
        assert seen.value("glm_router_tokens_total", type="cached_input") == 1
        assert seen.value("glm_router_requests_in_flight") == 0


async def test_a_refusal_is_counted_by_its_status_and_marks_the_span() -> None:
    with recorded() as seen:
        async with bench(telemetry=seen.telemetry) as b:
            with pytest.raises(grpc.aio.AioRpcError):
                await b.client.Generate(request("")).read()
        assert seen.value("glm_router_refusals_total", reason="invalid_argument") == 1
        assert seen.value("glm_router_tokens_total", type="output") is None
        assert seen.spans[SPAN].status.status_code is StatusCode.ERROR
        assert attributes(seen.spans[SPAN])["error.type"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("tracing", [True, False])
async def test_the_log_line_names_the_trace(tracing: bool) -> None:
    with recorded() as seen, capture_logs() as logs:
        async with bench(telemetry=seen.telemetry if tracing else None) as b:
            call = b.client.Generate(request(), metadata=(("traceparent", PARENT),))
            submit = await b.worker.submits.get()
            b.worker.finish(submit.request_id, encode(" of France"))
            async for _ in call:
                pass
        [line] = [line for line in logs if line["event"] == "request"]
        assert line["trace_id"] == TRACE == trace_id_of(submit.traceparent)
        assert {"request_id", "prompt_tokens", "ttft_ms", "tps"} <= line.keys()


@pytest.mark.parametrize(
    "given", ["", "00-abc", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"ff-{TRACE}-00f067aa0ba902b7-01"]
)
async def test_what_is_no_trace_context_is_not_passed_on(given: str) -> None:
    async with bench() as b:
        call = b.client.Generate(request(), metadata=(("traceparent", given), ("x-request-id", "r-2")))
        submit = await b.worker.submits.get()
        assert (submit.traceparent, submit.trace_id) == ("", "r-2")
        call.cancel()


async def test_an_overload_is_counted_and_logged_by_the_limit_that_was_reached() -> None:
    with recorded() as seen, capture_logs() as logs:
        async with bench(telemetry=seen.telemetry, max_requests=1) as b:
            held = b.client.Generate(request())
            await b.worker.submits.get()
            with pytest.raises(grpc.aio.AioRpcError):
                await b.client.Generate(request()).read()
            held.cancel()
        assert seen.value("glm_router_refusals_total", reason="requests") == 1
        overloads = [line.get("overload") for line in logs if line["event"] == "request"]
        assert overloads.count("requests") == 1
