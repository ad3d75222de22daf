"""Workers of several ranks as processes, on the embedded model: 9 query heads on 3 KV heads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from deploy.local import LocalOptions, local_cluster
from glmserve.inference.v1 import inference_pb2
from tests.e2e.client import connect
from tests.e2e.test_start_up import start_worker


@pytest.mark.parametrize("tp", [1, 3, 9])
async def test_every_layout_knows_the_capital_of_france(model_dir: Path, tp: int) -> None:
    options = LocalOptions(model_dir, worker_args=["--tp", str(tp)], router_args=["--max-queue-s", "600"])
    sampling = inference_pb2.SamplingOptions(max_tokens=1, temperature=0.0)
    request = inference_pb2.GenerateRequest(prompt="The capital of France is", sampling=sampling)
    with local_cluster(options, report=lambda _: None) as running:
        async with connect(running.router) as client:
            text = "".join([message.text async for message in client.Generate(request)])
    assert text == " Paris"


def test_a_layout_that_does_not_divide_is_refused_with_those_that_do(model_dir: Path) -> None:
    ended = start_worker("--model", str(model_dir), "--tp", "2")
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        "glm worker: error: tp=2 ep=1: num_attention_heads 9 is not a multiple of tp; "
        "layouts of this model: tp=1 ep=1, tp=3 ep=1, tp=9 ep=1"
    )


def test_a_rank_that_is_not_there_is_refused(model_dir: Path) -> None:
    ended = start_worker("--model", str(model_dir), "--tp", "3", "--rank-slice", "3")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        2,
        "glm worker: error: rank: 3, expected 0 to 2",
    )


def test_commands_take_layouts() -> None:
    command = ["glm", "generate", "--prompt", "The capital of France is", "--max-tokens", "1", "--tp", "3", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(answer)["text"] == " Paris"
