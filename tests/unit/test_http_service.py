"""The front as a service: clients that leave, deadlines, shutdown, TLS, metrics, tokens, the page's files."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from glmserve.service.settings import SettingsError
from glmserve.service.telemetry import TelemetrySettings, running_telemetry
from router.config import RouterConfig
from tests.unit.http_harness import HELLO, front
from tests.unit.router_harness import encode

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_closed_connection_aborts_on_the_worker(streamed: bool) -> None:
    async with front() as f:
        host, _, port = str(f.bench.router.http_address).partition(":")
        body = json.dumps({"messages": HELLO, "stream": streamed}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
        submit = await f.worker.submits.get()
        f.worker.tokens(submit.request_id, encode("a"))
        if streamed:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert await f.worker.aborts.get() == submit.request_id


async def test_a_stream_that_is_closed_by_the_official_client_aborts() -> None:
    async with front() as f:
        stream = asyncio.create_task(f.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        submit = await f.worker.submits.get()
        f.worker.tokens(submit.request_id, encode("a"))
        await (await stream).close()
        assert await f.worker.aborts.get() == submit.request_id


@pytest.mark.parametrize(("headers", "more"), [({"x-request-timeout-ms": "1000"}, {}), ({}, {"timeout": 1.0})])
async def test_a_deadline_ends_a_request(headers: dict[str, str], more: dict[str, float]) -> None:
    async with front() as f:
        response = await f.http.post(CHAT, json={"messages": HELLO, **more}, headers=headers)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        submit = await f.worker.submits.get()
        assert 0 < submit.timeout_ms <= 1000
        assert await f.worker.aborts.get() == submit.request_id


async def test_a_failure_in_mid_stream_is_raised_by_the_client() -> None:
    async with front(failover_moves=0) as f:
        stream = asyncio.create_task(f.openai.chat.completions.create(model="tiny", messages=HELLO, stream=True))
        submit = await f.worker.submits.get()
        f.worker.tokens(submit.request_id, encode("a"))
        chunks = await stream
        await f.bench.stop_worker()
        with pytest.raises(openai.APIError):
            async for _ in chunks:
                pass


async def test_draining_refuses_what_is_new_and_finishes_what_runs() -> None:
    async with front() as f:
        running = asyncio.create_task(f.http.post(CHAT, json={"messages": HELLO}))
        submit = await f.worker.submits.get()
        drained = asyncio.create_task(f.bench.router.drain(30))
        await f.bench.wait_health(False)
        assert (await f.http.post(CHAT, json={"messages": HELLO})).status_code == 503
        assert (await f.http.get("/readyz")).status_code == 503
        assert (await f.http.get("/healthz")).status_code == 200
        f.worker.finish(submit.request_id, encode("a"))
        assert (await running).status_code == 200
        await drained


async def test_the_request_id_is_the_clients_or_ours() -> None:
    async with front() as f:
        f.answer(encode("a"))
        response = await f.http.post(CHAT, json={"messages": HELLO}, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "chatcmpl-mine"
        assert (await f.http.post(CHAT, json={"messages": HELLO})).headers["x-request-id"] != "mine"


async def test_tokens_of_texts_and_of_chats_and_back() -> None:
    async with front() as f:
        text = await f.http.post("/tokenize", json={"prompt": "The capital"})
        assert text.json()["tokens"] == encode("The capital")
        chat = await f.http.post("/tokenize", json={"messages": HELLO})
        assert chat.json()["tokens"] == encode("<|user|>Hi<|assistant|>")
        back = await f.http.post("/detokenize", json={"tokens": text.json()["tokens"]})
        assert back.json()["prompt"] == "The capital"
        wrong = await f.http.post("/detokenize", json={"tokens": [1, 99999]})
        assert wrong.json()["error"]["param"] == "tokens[1]"


async def test_metrics_are_those_of_the_router() -> None:
    with running_telemetry("router", TelemetrySettings(), shows_metrics=True) as telemetry:
        async with front(telemetry=telemetry) as f:
            f.answer(encode("a"))
            await f.http.post(CHAT, json={"messages": HELLO})
            text = (await f.http.get("/metrics")).text
            assert 'gen_ai_server_request_duration_seconds_count{gen_ai_operation_name="chat"' in text


async def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere() -> None:
    async with front() as f:
        for path, kind in (("/", "text/html"), ("/chat.js", "text/javascript"), ("/chat.css", "text/css")):
            response = await f.http.get(path)
            assert response.headers["content-type"].startswith(kind)
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert "://" not in response.text


async def test_a_wrong_path_and_a_wrong_method() -> None:
    async with front() as f:
        assert (await f.http.get("/v2")).status_code == 404
        response = await f.http.get(CHAT)
        assert response.status_code == 405
        assert response.json()["error"]["message"] == f"GET {CHAT} is not served here"


async def test_an_idle_or_slow_head_and_garbage_do_not_disturb_others() -> None:
    async with front() as f:
        host, _, port = str(f.bench.router.http_address).partition(":")
        f.answer(encode("a"))
        _, silent = await asyncio.open_connection(host, int(port))
        reader, garbage = await asyncio.open_connection(host, int(port))
        garbage.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        reader, long = await asyncio.open_connection(host, int(port))
        long.write(b"GET / HTTP/1.1\r\nx: " + b"y" * (1 << 17))
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        assert (await f.http.post(CHAT, json={"messages": HELLO})).status_code == 200
        for writer in (silent, garbage, long):
            writer.close()


def test_beyond_loopback_it_needs_tls_and_known_callers() -> None:
    with pytest.raises(SettingsError, match=r"http_listen: 0.0.0.0:80 .*tls_cert"):
        RouterConfig.load(["--model", "m", "--worker", "127.0.0.1:1", "--http-listen", "0.0.0.0:80"], prog="x")
