"""API keys: the file, who is recognised, and what a stranger gets."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from deploy.cli.main import app
from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc
from glmserve.service import identity
from glmserve.service.grpc_server import GrpcServer, ServerSecurity, start_server
from glmserve.service.identity import Identity
from glmserve.service.reload import Reloaded
from glmserve.service.settings import SettingsError
from router.access.interceptor import ApiKeyInterceptor
from router.access.keys import key_hash, new_key, read_keys

Call = grpc.aio.AioRpcError


def write(path: Path, *entries: str) -> Path:
    path.write_text("\n".join(f"[[key]]\n{entry}" for entry in entries))
    return path


def entry(name: str, key: str, more: str = "") -> str:
    return f'name = "{name}"\nhash = "{key_hash(key)}"\n{more}'


def test_a_key_is_recognised_by_its_hash_alone(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    limits = "max_requests = 4\ntokens_per_minute = 1000\nmax_priority = 0"
    path = write(tmp_path / "keys.toml", entry("alice", alice), entry("bob", bob, limits))
    assert alice not in path.read_text()
    keys = read_keys(path)
    assert keys.identify(alice) == Identity("alice")
    assert keys.identify(bob) == Identity("bob", 4, 1000, 0)
    assert keys.identify(bob[:-1]) is None
    assert keys.identify(key_hash(bob)) is None, "who has read the file has no key"


HASH = key_hash("x")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "key: Field required"),
        ("key = []", "key: Tuple should have at least 1 item"),
        ("[[key", "is not TOML"),
        ('[[key]]\nname = "a"', "key.0.hash: Field required"),
        ('[[key]]\nname = "a b"\nhash = "sha256:00"', "key.0.name: String should match pattern"),
        ('[[key]]\nname = "a"\nhash = "glm_abc"', "key.0.hash: String should match pattern"),
        (f'[[key]]\nname = "a"\nhash = "{HASH}"\nmax_requests = 0', "key.0.max_requests"),
        (f'[[key]]\nname = "a"\nhash = "{HASH}"\nmax_priority = 101', "key.0.max_priority"),
        (f'[[key]]\nname = "a"\nhash = "{HASH}"\nrole = "x"', "key.0.role: Extra inputs are not permitted"),
        (f'[[key]]\nname = "a"\nhash = "{HASH}"\n' * 2, "key.1.name: 'a' is in the file twice"),
    ],
)
def test_a_wrong_keys_file_is_named_with_the_entry(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        read_keys(path)
    assert str(path) in str(caught.value)
    assert text in str(caught.value)
    assert "glm_abc" not in str(caught.value), "a key that was put in place of its hash is not shown"


def test_a_missing_keys_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"cannot read {tmp_path}/none: No such file"):
        read_keys(tmp_path / "none")


def test_key_create_prints_a_key_and_the_entry_that_accepts_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["key", "create", "carol", "--max-requests", "3", "--max-priority", "-1"])
    assert result.exit_code == 0
    key, _, toml = result.stdout.partition("\n")
    path = tmp_path / "keys.toml"
    path.write_text(toml)
    assert read_keys(path).identify(key) == Identity("carol", 3, None, -1)
    assert key not in toml


def test_key_create_refuses_a_name_that_the_file_would_not_take() -> None:
    result = CliRunner().invoke(app, ["key", "create", "a b"])
    assert result.exit_code == 2
    assert "'a b'" in result.output


class Handlers(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with the name of the caller."""

    async def Detokenize(self, request: Any, context: Any) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=identity.current().name)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for _ in range(2):
            yield inference_pb2.GenerateResponse(text=identity.current().name)


@contextlib.asynccontextmanager
async def guarded(path: Path) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    """A server that asks for the keys of the file."""
    handlers = Handlers()  # type: ignore[abstract]  # these two methods are all that is called
    security = ServerSecurity(interceptors=[ApiKeyInterceptor(Reloaded((path,), lambda: read_keys(path)))])
    server = await start_server(
        lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(handlers, server),
        ("glmserve.inference.v1.InferenceService",),
        "127.0.0.1:0",
        1 << 20,
        security,
    )
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield server, channel
    finally:
        await server.server.stop(None)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def caller(channel: grpc.aio.Channel, *metadata: tuple[str, str]) -> str:
    client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    reply = await client.Detokenize(inference_pb2.DetokenizeRequest(), metadata=metadata)
    text: str = reply.text
    return text


async def test_handlers_know_whose_key_it_was(tmp_path: Path) -> None:
    alice, bob = new_key(), new_key()
    async with guarded(write(tmp_path / "keys.toml", entry("alice", alice), entry("bob", bob))) as (_, channel):
        assert await caller(channel, *bearer(alice)) == "alice"
        assert await caller(channel, *bearer(bob)) == "bob"
        assert await caller(channel, ("authorization", f"bearer {bob}")) == "bob"
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        stream = client.Generate(inference_pb2.GenerateRequest(), metadata=bearer(alice))
        assert [message.text async for message in stream] == ["alice", "alice"]


async def test_strangers_are_unauthenticated_and_probes_are_not_asked(tmp_path: Path) -> None:
    key = new_key()
    async with guarded(write(tmp_path / "keys.toml", entry("alice", key))) as (server, channel):
        for metadata, text in [
            ((), "no API key"),
            (bearer(new_key()), "not known"),
            (bearer(""), "Bearer KEY"),
            ((("authorization", key),), "Bearer KEY"),
            ((("authorization", f"Basic {key}"),), "Bearer KEY"),
            (bearer(key) * 2, "Bearer KEY"),
        ]:
            with pytest.raises(Call) as caught:
                await caller(channel, *metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert text in (caught.value.details() or "")
            assert key not in (caught.value.details() or "")
        client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(Call) as caught:
            await client.Generate(inference_pb2.GenerateRequest()).read()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health: Any = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(service=server.services[0]))


async def test_a_key_is_taken_in_and_revoked_without_a_restart(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    path = write(tmp_path / "keys.toml", entry("alice", first))
    async with guarded(path) as (_, channel):
        assert await caller(channel, *bearer(first)) == "alice"
        write(path, entry("bob-the-second", second))
        assert await caller(channel, *bearer(second)) == "bob-the-second"
        with pytest.raises(Call) as caught:
            await caller(channel, *bearer(first))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        path.write_text("broken")
        assert await caller(channel, *bearer(second)) == "bob-the-second"
