"""The chat page in a real browser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, Route, async_playwright, expect

from deploy.local import LocalCluster

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no browser at {CHROMIUM}; apt install chromium")
PHONE = {"width": 390, "height": 700}


@pytest.fixture
async def page(cluster: LocalCluster) -> AsyncIterator[Page]:
    """The page, open. Whatever it complains of fails the test."""
    complaints: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport=PHONE)  # type: ignore[arg-type]
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        await page.goto(str(cluster.http))
        await expect(page.locator("h1")).to_have_text("smollm2-135m-glm")
        yield page
        await browser.close()
    assert complaints == []


async def ask_for(page: Page, **fields: object) -> None:
    """Have these fields in what the page asks the router for."""

    async def add(route: Route) -> None:
        await route.continue_(post_data=json.dumps({**json.loads(route.request.post_data or "{}"), **fields}))

    await page.route("**/chat/completions", add)


async def test_a_question_by_keyboard_gets_a_streamed_answer_and_its_speed(page: Page) -> None:
    await ask_for(page, temperature=0)
    await page.keyboard.type("What is the capital of France? Answer with one word.")
    await page.keyboard.press("Enter")
    await expect(page.locator("article.assistant")).to_contain_text("Paris", timeout=60_000)
    await expect(page.locator("output")).to_contain_text("tokens", timeout=60_000)
    await expect(page.locator("#text")).to_be_focused()


async def test_a_long_answer_can_be_stopped(page: Page) -> None:
    await ask_for(page, ignore_eos=True, max_tokens=3000)
    await page.fill("#text", "Tell me a very long story about the sea and all its ships.")
    await page.keyboard.press("Enter")
    await expect(page.locator("article.assistant .content")).not_to_be_empty(timeout=60_000)
    await page.keyboard.press("Escape")
    await expect(page.locator("output")).to_have_text("stopped")
    await expect(page.locator("#send")).to_be_visible()


async def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    width = await page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]


async def test_an_error_is_shown_and_the_question_kept(page: Page) -> None:
    await page.locator("#settings summary").click()
    await page.fill("#tools", "not JSON")
    await page.fill("#text", "Hello")
    await page.press("#text", "Enter")
    await expect(page.get_by_role("alert")).to_contain_text("JSON")
    await expect(page.locator("#text")).to_have_value("Hello")


async def test_thinking_is_folded_and_calls_are_shown(page: Page) -> None:
    """What this model does not do by itself, answered in the place of the router."""
    deltas = [
        '{"reasoning_content": "Let me see."}',
        '{"content": "I look it up."}',
        '{"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "look", "arguments": ""}}]}',
        '{"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}',
    ]
    chunks = [f'data: {{"choices": [{{"index": 0, "delta": {delta}, "finish_reason": null}}]}}\n\n' for delta in deltas]
    body = "".join([*chunks, "data: [DONE]\n\n"])
    await page.route("**/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    await page.fill("#text", "Hello")
    await page.press("#text", "Enter")
    await expect(page.locator("pre.call")).to_have_text("look({})")
    await expect(page.locator("details.thinking")).not_to_have_attribute("open", "")
    await expect(page.locator("details.thinking")).to_contain_text("Let me see.")
