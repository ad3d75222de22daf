"""What clients are told when something is wrong, and in which form."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from router.access.keys import key_hash
from tests.unit.http_harness import HELLO, front
from tests.unit.router_harness import encode

CHAT = "/v1/chat/completions"


def write_keys(directory: Path, **limits: int) -> Path:
    path = directory / "keys.toml"
    lines = "".join(f"{name} = {value}\n" for name, value in limits.items())
    path.write_text(f'[[key]]\nname = "alice"\nhash = "{key_hash("glm_secret")}"\n{lines}', encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, "{", None, "not JSON"),
        (CHAT, '{"messages": []} x', None, "not JSON"),
        (CHAT, "[" * 10_000, None, "not JSON"),
        (CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "not JSON"),
        (CHAT, "{}", "messages", "missing"),
        (CHAT, '{"messages": []}', "messages", "empty"),
        (CHAT, '{"messages": [{"role": "nobody", "content": "a"}]}', "messages[0].role", "nobody"),
        (CHAT, '{"messages": [{"role": "user", "content": 5}]}', "messages[0].content", "5"),
        (CHAT, '{"messages": [], "functions": []}', "functions", "use tools"),
        (CHAT, '{"messages": [], "modalities": ["audio"]}', "modalities[0]", "audio"),
        (CHAT, '{"messages": [], "temprature": 1}', "temprature", "not known"),
        (CHAT, '{"messages": [], "temperature": "1"}', "temperature", "1"),
        (CHAT, json.dumps({"messages": HELLO, "temperature": 3}), "temperature", "0 to 2"),
        (CHAT, json.dumps({"messages": HELLO, "top_p": float("nan")}), "top_p", "finite"),
        (CHAT, json.dumps({"messages": HELLO, "max_tokens": 0}), "max_tokens", "0"),
        (CHAT, json.dumps({"messages": HELLO, "max_completion_tokens": 10**6}), "max_completion_tokens", "allowed"),
        (CHAT, json.dumps({"messages": HELLO, "timeout": -1}), "timeout", "-1"),
        (CHAT, json.dumps({"messages": HELLO, "logit_bias": {"99999": 1}}), "logit_bias", "99999"),
        (CHAT, json.dumps({"messages": HELLO, "logit_bias": {"9" * 5000: 1}}), "logit_bias", "(5000 characters)"),
        ("/v1/completions", '{"prompt": ""}', "prompt", "at least one token"),
        ("/v1/completions", '{"prompt": []}', "prompt", "at least one prompt"),
        ("/v1/completions", '{"prompt": [1, -2]}', "prompt[1]", "-2"),
        ("/v1/completions", '{"prompt": [1, 99999]}', "prompt[1]", "99999"),
        ("/v1/completions", json.dumps({"prompt": ["a"] * 200}), "prompt", "200"),
    ],
)
async def test_a_wrong_value_is_named(path: str, body: str, param: str | None, words: str) -> None:
    async with front() as f:
        response = await f.http.post(path, content=body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert words in error["message"]


@pytest.mark.parametrize(
    "given", ["soon", "-1", "1.5", "", "0", "86400001", "9" * 400, "9" * 5000], ids=lambda g: g[:9]
)
async def test_a_deadline_that_is_none_is_named(given: str) -> None:
    async with front() as f:
        response = await f.http.post(CHAT, json={"messages": HELLO}, headers={"x-request-timeout-ms": given})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith("x-request-timeout-ms: ")


async def test_no_key_a_wrong_key_and_the_right_key_in_both_headers(tmp_path: Path) -> None:
    async with front(keys_file=write_keys(tmp_path)) as f:
        f.answer(encode("a"))
        body = {"messages": HELLO}
        for headers in ({}, {"authorization": "Basic x"}, {"authorization": "Bearer no"}, {"x-api-key": "no"}):
            response = await f.http.post(CHAT, json=body, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for headers in ({"authorization": "Bearer glm_secret"}, {"x-api-key": "glm_secret"}):
            assert (await f.http.post(CHAT, json=body, headers=headers)).status_code == 200
        assert (await f.http.get("/v1/models")).status_code == 401
        assert (await f.http.get("/healthz")).status_code == 200
        assert (await f.http.get("/readyz")).status_code == 200


async def test_a_body_is_not_read_into_memory_beyond_the_limit() -> None:
    async with front(max_message_bytes=1 << 16) as f:
        f.answer(encode("a"))
        response = await f.http.post(CHAT, content=b" " * (1 << 17))
        assert response.status_code == 413
        assert "65536" in response.json()["error"]["message"]
        assert (await f.http.post(CHAT, json={"messages": HELLO})).status_code == 200


async def test_a_refusal_for_load_says_when_to_try_again(tmp_path: Path) -> None:
    async with front(keys_file=write_keys(tmp_path, max_requests=1), key="glm_secret", retry_after_ms=2500) as f:
        body, headers = {"messages": HELLO}, {"x-api-key": "glm_secret"}
        first = asyncio.create_task(f.http.post(CHAT, json=body, headers=headers))
        submit = await f.worker.submits.get()
        with pytest.raises(openai.RateLimitError) as caught:
            await f.openai.chat.completions.create(model="tiny", messages=HELLO)
        assert caught.value.response.headers["retry-after"] == "3"
        assert int(caught.value.response.headers["retry-after-ms"]) in (2500, 2501)
        assert caught.value.code == "rate_limit_exceeded"
        f.worker.finish(submit.request_id, encode("a"))
        assert (await first).status_code == 200
