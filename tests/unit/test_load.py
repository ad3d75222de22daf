"""The load client: arrivals, traces, figures, and a load on a router whose worker is scripted."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.load import plots
from deploy.load.arrivals import Arrival, TraceError, poisson, read_trace
from deploy.load.client import Sample, connected
from deploy.load.report import Slo, percentile, summarise
from glmserve.engine.v1 import engine_pb2
from router.access.keys import key_hash, new_key
from tests.unit.router_harness import bench, step

SLO = Slo(ttft_ms=100, tpot_ms=50)


def test_poisson_arrivals_repeat_with_their_seed_and_have_their_rate() -> None:
    first, again, other = (poisson(50, 100, 8, 4, seed) for seed in (1, 1, 2))
    assert first == again != other
    times = [arrival.arrival_s for arrival in first]
    assert times == sorted(times)
    assert times[-1] < 100
    assert len(times) == pytest.approx(5000, rel=0.05)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # Of an exponential distribution the deviation is the mean.
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 1.5, "prompt_tokens": 4, "output_tokens": 2}\n\n'
        '{"arrival_s": 0, "prompt_tokens": 8, "output_tokens": 1, "note": "ignored"}\n'
    )
    assert read_trace(path) == [Arrival(0, 8, 1), Arrival(1.5, 4, 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("{", ":1: "),
        ("[]", ":1: not a JSON object"),
        (
            '{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}',
            "arrival_s is -1; allowed: a number of at least 0",
        ),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is nan"),
        (
            '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}',
            "prompt_tokens is 0; allowed: an integer of at least 1",
        ),
        ('{"arrival_s": 0, "prompt_tokens": 1.5, "output_tokens": 1}', "prompt_tokens is 1.5"),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": true}', "output_tokens is True"),
        ('{"arrival_s": 0, "prompt_tokens": 1}', "output_tokens is None"),
    ],
)
def test_a_wrong_trace_names_line_field_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nothing.jsonl"):
        read_trace(tmp_path / "nothing.jsonl")


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert percentile([1, 2, 3, 4], 50) == 2.5
    assert [percentile([1, 2, 3], percent) for percent in (0, 50, 100)] == [1, 2, 3]
    assert percentile([7], 99) == 7


def test_figures_count_from_when_a_request_was_due() -> None:
    good = Sample(0.0, 0.01, "OK", 10, 3, first_s=0.05, end_s=0.15, gaps_s=[0.05, 0.05])
    late = Sample(1.0, 1.2, "OK", 10, 3, first_s=1.25, end_s=1.35, gaps_s=[0.05, 0.05])
    slow = Sample(1.0, 1.0, "OK", 10, 3, first_s=1.05, end_s=1.25, gaps_s=[0.1, 0.1])
    refused = Sample(1.0, 1.0, "RESOURCE_EXHAUSTED", end_s=1.002, retry_after_ms=100)
    report = summarise([good, late, slow, refused], SLO)
    assert report["by_status"] == {"OK": 3, "RESOURCE_EXHAUSTED": 1}
    assert report["seconds"] == 1.35
    assert report["ttft_ms"]["max"] == 250
    assert report["refusal_ms"]["max"] == 2
    assert report["client_lag_ms"]["max"] == 200
    assert report["output_tokens_per_s"] == pytest.approx(9 / 1.35, abs=1e-3)
    assert report["goodput"]["requests_per_s"] == pytest.approx(1 / 1.35, abs=1e-3)
    assert report["goodput"]["share"] == 0.25
    assert [report["time_per_output_token_ms"][key] for key in ("p50", "max")] == [50, 100]


def test_nothing_sent_is_no_error() -> None:
    report = summarise([], SLO)
    assert (report["requests"], report["ttft_ms"], report["goodput"]["share"]) == (0, None, 0.0)


async def test_open_loop_sends_all_and_notes_what_came_back() -> None:
    async with bench() as b:

        def answer(submit: engine_pb2.Submit) -> list[engine_pb2.ServeResponse]:
            assert (len(submit.prompt_token_ids), submit.sampling.max_tokens, submit.sampling.ignore_eos) == (
                5,
                3,
                True,
            )
            usage = {"prompt_tokens": 5}
            return [step(submit.request_id, [300]), step(submit.request_id, [301, 302], "LENGTH", usage=usage)]

        b.worker.answer = answer
        async with connected(b.router.address, 2, seed=3, prefix_tokens=2) as client:
            samples = await client.run_open([Arrival(0.0, 5, 3), Arrival(0.01, 5, 3), Arrival(0.01, 5, 3)])
        prompts = [list((await b.worker.submits.get()).prompt_token_ids) for _ in samples]
    assert [(sample.status, sample.prompt_tokens, sample.output_tokens) for sample in samples] == [("OK", 5, 3)] * 3
    assert [sample.due_s for sample in samples] == [0.0, 0.01, 0.01]
    assert all(sample.due_s <= sample.sent_s <= (sample.first_s or 0) <= sample.end_s for sample in samples)
    assert len({tuple(prompt[:2]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3


async def test_a_refusal_is_a_sample_with_its_delay() -> None:
    async with bench(max_requests=1) as b, connected(b.router.address, 1, seed=3, prefix_tokens=0) as client:
        held = b.client.Generate(client._request(Arrival(0, 4, 2)))
        await b.worker.submits.get()
        [sample] = await client.run_open([Arrival(0.0, 4, 2)])
        held.cancel()
    assert sample.status == "RESOURCE_EXHAUSTED"
    assert sample.retry_after_ms is not None
    assert sample.ttft_s is None


async def test_a_key_goes_with_every_call(tmp_path: Path) -> None:
    key = new_key()
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(f'[[key]]\nname = "load"\nhash = "{key_hash(key)}"\n')
    metadata = (("authorization", f"Bearer {key}"),)
    async with bench(keys_file=keys_file) as b:
        b.worker.answer = lambda submit: [step(submit.request_id, [300], "LENGTH")]
        async with connected(b.router.address, 1, seed=3, prefix_tokens=0, metadata=metadata) as client:
            [sample] = await client.run_open([Arrival(0.0, 4, 1)])
        assert sample.status == "OK"
        with pytest.raises(DeployError, match="UNAUTHENTICATED"):
            async with connected(b.router.address, 1, seed=3, prefix_tokens=0):
                pass


async def test_closed_loop_keeps_its_number_in_flight() -> None:
    async with bench() as b, connected(b.router.address, 1, seed=3, prefix_tokens=0) as client:
        load = asyncio.create_task(client.run_closed(Arrival(0.0, 4, 1), 3, 0.0001))
        submits = [await b.worker.submits.get() for _ in range(3)]
        assert b.worker.submits.empty()
        for submit in submits:
            b.worker.finish(submit.request_id, [300])
        samples = await load
    assert [sample.status for sample in samples] == ["OK"] * 3


async def test_a_router_that_is_not_there_is_named() -> None:
    with pytest.raises(DeployError, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        async with connected("127.0.0.1:1", 1, seed=0, prefix_tokens=0):
            pass


def test_plots_are_written_or_their_need_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(0.0, 0.01, "OK", 10, 3, first_s=0.05, end_s=0.15, gaps_s=[0.05, 0.05])
    written = plots.draw([sample, Sample(0.0, 0.0, "UNAVAILABLE", end_s=0.1)], tmp_path / "new")
    assert [path.read_bytes()[:4] for path in written] == [b"\x89PNG"] * 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.PlotsError, match=r"pip install 'glmserve\[plots\]'"):
        plots.require_matplotlib()


def test_the_report_is_plain_json() -> None:
    report = summarise([Sample(0.0, 0.01, "OK", 10, 3, first_s=0.05, end_s=0.15, gaps_s=[0.05, 0.05])], SLO)
    assert json.loads(json.dumps(report)) == report
