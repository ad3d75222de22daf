"""TLS from client to router to worker, over real sockets, and certificates that change while both run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from glmserve.engine.v1 import engine_pb2_grpc
from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc
from glmserve.service.grpc_server import GrpcServer, ServerSecurity, start_server
from glmserve.service.settings import SettingsError
from glmserve.service.telemetry import Telemetry
from glmserve.service.tls import TlsFiles, server_credentials
from router.config import RouterConfig
from router.server import Router
from tests.certificates import Authority
from tests.unit.router_harness import ENGINE, ScriptedWorker, encode, step, text_model, wait_health

# Channels that do not share connections, so that each makes a handshake of its own.
_OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]


@contextlib.asynccontextmanager
async def tls_worker(files: TlsFiles, listen: str = "127.0.0.1:0") -> AsyncIterator[GrpcServer]:
    """Answers every request with Paris."""
    worker = ScriptedWorker()
    worker.answer = lambda submit: [step(submit.request_id, encode("Paris"), "LENGTH")]
    server = await start_server(
        lambda server: engine_pb2_grpc.add_EngineServiceServicer_to_server(worker, server),
        (ENGINE,),
        listen,
        1 << 20,
        ServerSecurity(server_credentials(files)),
    )
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.server.stop(None)


@contextlib.asynccontextmanager
async def running_router(worker: str, **settings: Any) -> AsyncIterator[Router]:
    config = RouterConfig(model=Path("unused"), worker=worker, listen="127.0.0.1:0", **settings)
    router = await Router.start(config, text_model(), Telemetry())
    try:
        yield router
    finally:
        await router.stop()


def listening(files: TlsFiles) -> dict[str, Path | None]:
    return {"tls_cert": files.cert, "tls_key": files.key, "tls_client_ca": files.ca}


def reaching(files: TlsFiles) -> dict[str, Path | None]:
    return {"worker_tls_cert": files.cert, "worker_tls_key": files.key, "worker_tls_ca": files.ca}


@contextlib.asynccontextmanager
async def connect(router: Router, credentials: grpc.ChannelCredentials | None) -> AsyncIterator[grpc.aio.Channel]:
    if credentials is None:
        channel = grpc.aio.insecure_channel(router.address, options=_OWN_CONNECTION)
    else:
        channel = grpc.aio.secure_channel(router.address, credentials, options=_OWN_CONNECTION)
    async with channel:
        yield channel


async def answer(channel: grpc.aio.Channel) -> str:
    client: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    call = client.Generate(inference_pb2.GenerateRequest(prompt="The capital of France is"))
    return "".join([response.text async for response in call])


async def assert_no_connection(router: Router, credentials: grpc.ChannelCredentials | None) -> None:
    async with connect(router, credentials) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_both_hops_ask_for_certificates(tmp_path: Path) -> None:
    outside, inside = Authority(tmp_path), Authority(tmp_path)
    settings = {**listening(outside.issue("router")), **reaching(inside.issue("router-to-worker"))}
    async with (
        tls_worker(inside.issue("worker")) as worker,
        running_router(worker.address, **settings) as router,
    ):
        async with connect(router, outside.credentials("client")) as channel:
            await wait_health(channel, True)
            assert await answer(channel) == "Paris"
        await assert_no_connection(router, None)
        await assert_no_connection(router, outside.credentials("client", own=False))
        await assert_no_connection(router, inside.credentials("client"))


async def test_a_router_does_not_use_a_worker_of_another_authority(tmp_path: Path) -> None:
    settings = reaching(Authority(tmp_path).issue("router"))
    async with (
        tls_worker(Authority(tmp_path).issue("worker")) as worker,
        running_router(worker.address, **settings) as router,
        connect(router, None) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(channel)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_new_connections_get_renewed_certificates_and_old_ones_go_on(tmp_path: Path) -> None:
    before, after = Authority(tmp_path), Authority(tmp_path)
    settings = {**listening(before.issue("router")), **reaching(before.issue("router-to-worker"))}
    async with (
        tls_worker(before.issue("worker")) as worker,
        running_router(worker.address, **settings) as router,
        connect(router, before.credentials("client")) as old,
    ):
        await wait_health(old, True)
        after.issue("router")
        async with connect(router, after.credentials("client")) as new:
            assert await answer(new) == "Paris"
        await assert_no_connection(router, before.credentials("client"))
        assert await answer(old) == "Paris"


async def test_the_link_to_the_worker_comes_back_with_renewed_certificates(tmp_path: Path) -> None:
    before, after = Authority(tmp_path), Authority(tmp_path)
    async with (
        tls_worker(before.issue("worker")) as first,
        running_router(first.address, **reaching(before.issue("router"))) as router,
        connect(router, None) as channel,
    ):
        await wait_health(channel, True)
        await first.server.stop(None)
        await wait_health(channel, False)
        async with tls_worker(after.issue("worker"), first.address):
            after.issue("router")
            await wait_health(channel, True)
            assert await answer(channel) == "Paris"


async def test_the_worker_s_certificate_may_be_for_another_name_than_its_address(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = reaching(authority.issue("router"))
    async with (
        tls_worker(authority.issue("worker"), "127.0.0.2:0") as worker,
        running_router(worker.address, worker_tls_name="localhost", **files) as router,
        connect(router, None) as channel,
    ):
        await wait_health(channel, True)


async def test_bad_files_stop_the_start(tmp_path: Path) -> None:
    files, other = Authority(tmp_path).issue("router"), Authority(tmp_path).issue("other")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tls_cert": files.cert, "tls_key": other.key}, f"{other.key} is not the key of"),
        ({"worker_tls_ca": tmp_path / "none"}, f"cannot read {tmp_path}/none"),
        ({"keys_file": tmp_path / "none"}, f"cannot read {tmp_path}/none"),
    ]
    for settings, text in cases:
        with pytest.raises(SettingsError, match=text):
            async with running_router("127.0.0.1:1", **settings):
                pass
