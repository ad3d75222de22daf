"""The command `glm`, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from deploy.local import LocalCluster


def glm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["glm", *args], capture_output=True, text=True, check=False, timeout=90)


def test_generate_starts_the_pair_itself(model_dir: Path) -> None:
    ended = glm("generate", "--model", str(model_dir), "--prompt", "The capital of France is", "--max-tokens", "8")
    assert ended.returncode == 0, ended.stderr
    assert "Paris" in ended.stdout


def test_generate_prints_one_json_object(cluster: LocalCluster) -> None:
    ended = glm(
        *("generate", "--target", cluster.router, "--prompt", "The capital of France is", "--max-tokens", "4"),
        *("--temperature", "0", "--logprobs", "2", "--json"),
    )
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert set(answer) == {"prompt_ids", "token_ids", "text", "finish_reason", "logprobs", "usage", "timings"}
    assert len(answer["prompt_ids"]) == answer["usage"]["prompt_tokens"] == 5
    assert len(answer["token_ids"]) == len(answer["logprobs"]) == 4
    assert answer["finish_reason"] == "length"
    for token_id, entry in zip(answer["token_ids"], answer["logprobs"], strict=True):
        assert entry["id"] == token_id
        assert len(entry["top"]) == 2


def test_prompt_ids_stop_and_seed(cluster: LocalCluster) -> None:
    args = (
        "generate",
        "--target",
        cluster.router,
        "--prompt-ids",
        "504,3575,282,4649,314",
        "--max-tokens",
        "12",
        "--json",
    )
    sampled = ("--temperature", "1", "--seed", "3")
    first, second = (json.loads(glm(*args, *sampled).stdout) for _ in range(2))
    assert first["prompt_ids"] == [504, 3575, 282, 4649, 314]
    assert first["token_ids"] == second["token_ids"]
    stopped = json.loads(glm(*args, "--temperature", "0", "--stop", "Paris").stdout)
    assert (stopped["finish_reason"], stopped["text"].strip()) == ("stop", "")


def test_a_target_that_is_not_there_is_an_error() -> None:
    ended = glm("generate", "--target", "127.0.0.1:1", "--prompt", "x")
    assert ended.returncode == 1
    assert "127.0.0.1:1" in ended.stderr


def test_bad_values_name_the_field(cluster: LocalCluster) -> None:
    ended = glm("generate", "--target", cluster.router, "--prompt", "x", "--temperature", "9")
    assert ended.returncode != 0
    assert "temperature" in ended.stderr
