"""Worker and router as processes on GPUs, one and two of them, with the embedded model.

`GLM_TEST_TABLE=cuda pytest tests/chaos/test_gpu.py`; with `cpu` the same on the CPU, but for the faults of a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from deploy.local import ANY_PORT, LocalCluster, LocalOptions, local_cluster
from deploy.models.catalog import SMOLLM2, SMOLLM2_4KV, resolve_model
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.processes import Service, services, wait_health, wait_idle
from tests.e2e.client import connect, generate, request
from tests.golden.table import TABLE, most_ranks
from tests.unit.worker_harness import Stream, submit

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("GLM_TEST_TABLE" not in os.environ, reason="GLM_TEST_TABLE=cuda where there is a GPU"),
]

LIMIT_S = 10.0  # from a fault to the end of the process
PARIS = "The capital of France is"
PROMPTS = [PARIS, "Once upon a time", "Water boils at a temperature of", "def fibonacci(n):", "Roses are red,"]
SAMPLINGS = [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}, {"temperature": 0.8, "top_k": 40, "seed": 3}]
LONG = {"max_tokens": 3000, "ignore_eos": True}
TABLES = {
    "futhark": ["--device", "cpu", "--kernels", "futhark"],
    "futhark_cuda": ["--device", "cuda", "--kernels", "futhark"],
}
LAYOUTS = {
    "one": ["--tp", "1"],
    "two": ["--tp", "2", "--ep", "2"],
    "all-to-all": [
        *("--tp", "2", "--ep", "2"),
        *("--expert-exchange-prefill", "all_to_all", "--expert-exchange-decode", "all_to_all"),
    ],
}


def worker_args(layout: str) -> list[str]:
    """A worker's flags; skips where there are too few GPUs."""
    if (ranks := int(LAYOUTS[layout][1])) > most_ranks():
        pytest.skip(f"{ranks} ranks need a GPU each, this machine has {most_ranks()}")
    return [*TABLES.get(TABLE, ["--device", TABLE]), *LAYOUTS[layout]]


def model_of(layout: str) -> Path:
    return resolve_model((SMOLLM2 if layout == "one" else SMOLLM2_4KV).name)


@pytest.fixture(scope="module", params=list(LAYOUTS))
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    router_args = ["--max-queue-s", "600", "--http-listen", ANY_PORT]
    options = LocalOptions(model_of(request.param), worker_args=worker_args(request.param), router_args=router_args)
    with local_cluster(options, report=lambda _: None) as running:
        yield running


@pytest.fixture
async def client(cluster: LocalCluster) -> AsyncIterator[Client]:
    async with connect(cluster.router) as client:
        yield client


async def test_it_answers_over_grpc_and_http(cluster: LocalCluster, client: Client) -> None:
    answer = await generate(client, PARIS, max_tokens=24)
    assert answer.text.startswith(" Paris")
    asked = {"model": (await model_name(cluster)), "prompt": PARIS, "max_tokens": 24, "temperature": 0}
    assert (await asyncio.to_thread(post, f"{cluster.http}/v1/completions", asked))["choices"][0]["text"] == answer.text
    question = {"role": "user", "content": "What is the capital of France? Answer with one word."}
    asked = {"model": asked["model"], "messages": [question], "max_tokens": 100, "temperature": 0}
    chat = await asyncio.to_thread(post, f"{cluster.http}/v1/chat/completions", asked)
    assert "Paris" in chat["choices"][0]["message"]["content"]
    assert chat["choices"][0]["finish_reason"] == "stop"


async def model_name(cluster: LocalCluster) -> str:
    async with grpc.aio.insecure_channel(cluster.workers[0]) as channel:
        info = await engine_pb2_grpc.EngineServiceStub(channel).GetInfo(engine_pb2.GetInfoRequest())
    assert info.kernels == TABLE
    return str(info.model_name)


def post(url: str, body: object) -> Any:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "top p", "top k"])
async def test_tokens_are_the_same_alone_and_in_a_crowd(
    cluster: LocalCluster, client: Client, sampling: dict[str, float]
) -> None:
    alone = [await generate(client, prompt, max_tokens=32, **sampling) for prompt in PROMPTS]
    crowd = await asyncio.gather(
        *(generate(client, prompt, max_tokens=32 + i % 7, **sampling) for i, prompt in enumerate(PROMPTS * 9))
    )
    for i, answer in enumerate(crowd):
        assert answer.token_ids[:32] == alone[i % len(PROMPTS)].token_ids
    await wait_idle(cluster.workers[0])


@pytest.mark.parametrize("count", [1, 2, 5, 16, 40])
async def test_each_request_echoes_its_own_codeword(client: Client, count: int) -> None:
    codewords = [f"{(i + 1) * 7919 % 100000:05d}" for i in range(count)]
    prompts = [f"The code is {word}. " * 6 + "The code is" for word in codewords]
    answers = await asyncio.gather(*(generate(client, prompt, max_tokens=8) for prompt in prompts))
    assert [word for word, answer in zip(codewords, answers, strict=True) if word not in answer.text] == []


async def test_a_cancelled_request_leaves_nothing(cluster: LocalCluster, client: Client) -> None:
    undisturbed = await generate(client, PROMPTS[1], max_tokens=48)
    other = asyncio.create_task(generate(client, PROMPTS[1], max_tokens=48))
    call = client.Generate(request("The story of the sea", **LONG))
    assert (await call.read()) is not grpc.aio.EOF
    call.cancel()
    assert (await other).token_ids == undisturbed.token_ids
    await wait_idle(cluster.workers[0])


@asynccontextmanager
async def streaming(worker: Service, tokens: int) -> AsyncIterator[Stream]:
    """A started worker that has given the first tokens of request 1."""
    with services(worker):
        await asyncio.to_thread(worker.start)
        await wait_health(worker.address, True)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stream = Stream(engine_pb2_grpc.EngineServiceStub(channel).Serve())
            await stream.send(submit(1, [1, 2, 3], tokens), credit=100_000)
            while not stream.ends or not stream.ends[1].token_ids:
                await stream.read()
            yield stream


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_sigterm_lets_a_running_request_end(layout: str, tmp_path: Path) -> None:
    worker = Service("engine_worker", tmp_path, "--model", str(model_of(layout)), *worker_args(layout))
    async with streaming(worker, 200) as stream:
        worker.signal(signal.SIGTERM)
        end = await stream.end_of(1)
        assert await asyncio.to_thread(worker.process.wait) == 0
    assert end.finish is not None and end.finish.reason == engine_pb2.FINISH_REASON_LENGTH
    assert len(end.token_ids) == 200


@pytest.mark.skipif(TABLE != "cuda", reason="a fault of a GPU")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fault", [signal.SIGUSR1, signal.SIGUSR2], ids=["hangs", "fails"])
async def test_a_gpu_that_fails_ends_the_worker_with_a_report(
    layout: str, fault: signal.Signals, tmp_path: Path
) -> None:
    gpu = int(LAYOUTS[layout][1]) - 1
    if (gpu, fault) == (0, signal.SIGUSR1):
        pytest.skip("a GPU alone keeps nobody waiting: step_timeout_seconds")
    worker = Service(
        "tests.chaos.faulty_gpu_worker",
        tmp_path,
        *("--model", str(model_of(layout)), *worker_args(layout), "--stall-seconds", "2"),
        environment={"GLM_FAULT_GPU": str(gpu)},
    )
    async with streaming(worker, 4000) as stream:
        worker.signal(fault)
        end = await asyncio.wait_for(stream.end_of(1), LIMIT_S)
        assert await asyncio.to_thread(worker.process.wait, LIMIT_S) == 1
    assert end.finish is not None and end.finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE
    assert 0 < end.finish.usage.completion_tokens == len(end.token_ids) < 4000
    named = r"\bin step \d+" if gpu == 0 else r"\brank 0 \w+ op \S+ \S+ of step \d+"
    assert re.search(named, worker.last_words), worker.last_words
