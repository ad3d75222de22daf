"""What the worker tells of steps and requests."""

from __future__ import annotations

from opentelemetry.trace import StatusCode

from glmserve.engine.v1 import engine_pb2
from tests.unit.telemetry_harness import attributes, parent_id, recorded
from tests.unit.worker_harness import running_worker, submit

PARENT = "00-0123456789abcdef0123456789abcdef-00f067aa0ba902b7-01"


async def test_steps_and_requests_are_counted_by_phase_and_reason() -> None:
    with recorded() as seen:
        async with running_worker(telemetry=seen.telemetry) as worker, worker.stream() as stream:
            await stream.send(submit(1, max_tokens=5), submit(2, prompt=[1] * 40, max_tokens=3))
            await stream.end_of(1)
            await stream.end_of(2)
            load = await worker.wait_for_load(lambda load: not load.running_requests)
        steps = {
            phase: seen.value("glm_worker_step_duration_seconds_count", phase=phase) or 0
            for phase in ("prefill", "mixed", "decode")
        }
        assert sum(steps.values()) == load.steps == seen.value("glm_worker_steps_total")
        assert steps["prefill"] >= 1
        assert steps["decode"] >= 2
        assert seen.value("glm_worker_step_duration_seconds_sum", phase="decode") == steps["decode"] * 1e-6
        assert seen.value("glm_worker_inter_token_latency_seconds_count") == steps["mixed"] + steps["decode"]
        assert seen.value("glm_worker_generated_tokens_total") == 8
        assert seen.value("glm_worker_prompt_tokens_total") == 43
        assert seen.value("glm_worker_request_duration_seconds_count", reason="length") == 2
        assert seen.value("glm_worker_time_to_first_token_seconds_count") == 2
        assert seen.value("glm_worker_queue_duration_seconds_count") == 2
        pages = {state: seen.value("glm_worker_kv_pages", state=state) for state in ("free", "cached", "held")}
        assert pages == {"free": load.free_pages, "cached": load.cached_pages, "held": 0}


async def test_a_rejection_is_counted_by_reason() -> None:
    with recorded() as seen:
        async with running_worker(telemetry=seen.telemetry) as worker, worker.stream() as stream:
            await stream.send(submit(1, prompt=()))
            await stream.end_of(1)
        assert seen.value("glm_worker_rejections_total", reason="invalid") == 1
        assert seen.exporter.get_finished_spans() == ()


async def test_a_requests_spans_follow_one_another_within_the_routers() -> None:
    with recorded() as seen:
        async with running_worker(telemetry=seen.telemetry) as worker, worker.stream() as stream:
            request = submit(1, max_tokens=5)
            request.traceparent = PARENT
            await stream.send(request)
            await stream.end_of(1)
        spans = seen.spans
        whole, queue, prefill, decode = (spans[f"engine.{name}"] for name in ("request", "queue", "prefill", "decode"))
        assert whole.context.trace_id == 0x0123456789ABCDEF0123456789ABCDEF
        assert parent_id(whole) == 0x00F067AA0BA902B7
        assert {parent_id(span) for span in (queue, prefill, decode)} == {whole.context.span_id}
        assert whole.start_time == queue.start_time
        assert (queue.end_time, prefill.end_time, decode.end_time) == (
            prefill.start_time,
            decode.start_time,
            whole.end_time,
        )
        assert attributes(whole) == {
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.finish_reasons": ("length",),
            "glm.cached_prompt_tokens": 0,
            "glm.preemptions": 0,
        }


async def test_a_trace_that_its_client_does_not_sample_is_not_recorded() -> None:
    with recorded() as seen:
        async with running_worker(telemetry=seen.telemetry) as worker, worker.stream() as stream:
            request = submit(1, max_tokens=2)
            request.traceparent = PARENT[:-2] + "00"
            await stream.send(request)
            await stream.end_of(1)
        assert seen.exporter.get_finished_spans() == ()


async def test_a_failed_request_marks_its_span() -> None:
    with recorded() as seen:
        async with running_worker(telemetry=seen.telemetry) as worker, worker.stream() as stream:
            worker.engine.poison = frozenset({7})
            await stream.send(submit(1, max_tokens=5, seed=7))
            ended = await stream.end_of(1)
        assert ended.finish is not None
        assert ended.finish.reason == engine_pb2.FINISH_REASON_NUMERICAL_ERROR
        assert seen.spans["engine.request"].status.status_code is StatusCode.ERROR
        assert seen.value("glm_worker_request_duration_seconds_count", reason="numerical_error") == 1
