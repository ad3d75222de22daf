"""The public API over TLS from a gRPC implementation that is not ours: Node's @grpc/grpc-js."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from deploy.child import Child
from deploy.local import ANY_PORT, LocalCluster
from glmserve.service.tls import TlsFiles, channel_credentials
from router.access.keys import key_hash, new_key
from tests.certificates import Authority
from tests.e2e.client import connect, generate
from tests.unit.router_harness import wait_health

SOURCE = Path(__file__).parent / "node"
INSTALLED = Path(__file__).parents[2] / "build/node"
SERVICE = "glmserve.inference.v1.InferenceService"
PROMPT = "The capital of France is"


@pytest.fixture(scope="session")
def node() -> str:
    """Path of node, with the client's packages installed for it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    wanted = (SOURCE / "package.json").read_bytes()
    stamp = INSTALLED / "installed.json"
    if not stamp.exists() or stamp.read_bytes() != wanted:
        INSTALLED.mkdir(parents=True, exist_ok=True)
        (INSTALLED / "package.json").write_bytes(wanted)
        install = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(install, cwd=INSTALLED, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"npm install failed: {done.stderr}"
        stamp.write_bytes(wanted)
    return node


@pytest.fixture
def api_key(tmp_path: Path) -> str:
    key = new_key()
    (tmp_path / "keys.toml").write_text(f'[[key]]\nname = "node"\nhash = "{key_hash(key)}"\n')
    return key


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return Authority(tmp_path).issue("router")


@pytest.fixture
async def router(
    cluster: LocalCluster, model_dir: Path, tmp_path: Path, files: TlsFiles, api_key: str
) -> AsyncIterator[str]:
    """Address of a router that asks for a certificate and a key."""
    ready = tmp_path / "ready.json"
    flags = ["--tls-cert", files.cert, "--tls-key", files.key, "--tls-client-ca", files.ca]
    args = ["--model", model_dir, "--worker", cluster.workers[0], "--listen", ANY_PORT, "--ready-file", ready]
    child = Child("router", "router", [*map(str, [*args, *flags]), "--keys-file", str(tmp_path / "keys.toml")])
    try:
        while not ready.exists():
            child.check()
            await asyncio.sleep(0.02)
        address = json.loads(ready.read_text())["address"]
        async with grpc.aio.secure_channel(address, channel_credentials(files.read())) as channel:
            await wait_health(channel, True)
        yield address
    finally:
        child.stop()


async def probe(node: str, *args: object) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        node,
        str(SOURCE / "probe.cjs"),
        *map(str, args),
        env={**os.environ, "NODE_PATH": str(INSTALLED / "node_modules")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    found: dict[str, Any] = json.loads(out)
    return found


async def test_health_reflection_and_a_call_by_what_reflection_says(
    node: str, cluster: LocalCluster, router: str, files: TlsFiles, api_key: str
) -> None:
    found = await probe(node, router, files.ca, files.cert, files.key, api_key, PROMPT)
    assert found["health"] == {"all": "SERVING", "service": "SERVING"}
    assert {SERVICE, "grpc.health.v1.Health"} <= set(found["services"])
    assert {"Generate", "Chat", "Tokenize", "Detokenize", "GetModel"} <= set(found["methods"])
    async with connect(cluster.router) as client:
        ours = await generate(client, PROMPT, max_tokens=8)
    answer = found["answer"]
    assert (answer["code"], answer["text"], answer["token_ids"]) == ("OK", ours.text, ours.token_ids)
    assert answer["finish"]["usage"]["completion_tokens"] == 8
    assert found["stranger"]["code"] == "UNAUTHENTICATED"
    assert "no API key" in found["stranger"]["details"]
