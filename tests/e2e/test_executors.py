"""The embedded model says the same whatever runs its steps, token for token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deploy.local import LocalOptions, local_cluster
from tests.e2e.client import connect, generate
from tests.e2e.test_generate import PROMPTS
from tests.terra_toolchain import needs_terra

if TYPE_CHECKING:
    from glmserve.inference.v1.inference_pb2_grpc import InferenceServiceAsyncStub as Client


@needs_terra
@pytest.mark.parametrize("executor", ["terra", "terra-debug"])
async def test_text_is_that_of_the_built_in_executor(client: Client, model_dir: Path, executor: str) -> None:
    options = LocalOptions(model_dir, worker_args=["--executor", executor], router_args=["--max-queue-s", "600"])
    with local_cluster(options, report=lambda _: None) as cluster:
        async with connect(cluster.router) as driven:
            for prompt in PROMPTS:
                for asked in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
                    wanted = await generate(client, prompt, max_tokens=24, **asked)
                    found = await generate(driven, prompt, max_tokens=24, **asked)
                    assert found.token_ids == wanted.token_ids and found.text == wanted.text
