"""Services whose launcher dies without a word stop too, once what they run is done."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from tests.e2e.client import Answer, connect, request


def children(pid: int) -> list[int]:
    """Of its main thread: others come and go."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_a_launcher_that_is_killed_leaves_no_service_and_no_request_behind(model_dir: Path) -> None:
    launcher = await asyncio.create_subprocess_exec(
        *("glm", "serve", "--model", str(model_dir)), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    services: list[int] = []
    try:
        assert launcher.stdout is not None
        name, address = (await launcher.stdout.readline()).decode().split()
        assert name == "router"
        services = [os.pidfd_open(pid) for pid in children(launcher.pid)]
        assert len(services) == 2
        answer = Answer()
        async with connect(address) as client:
            async for response in client.Generate(request("Once upon a time", max_tokens=64, ignore_eos=True)):
                if not answer.messages:
                    launcher.kill()
                answer.add(response)
        assert len(answer.token_ids) == 64
        for service in services:
            await asyncio.to_thread(select.select, [service], [], [])
    finally:
        for service in services:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(service, signal.SIGKILL)
            os.close(service)
        with suppress(ProcessLookupError):
            launcher.kill()
        await launcher.communicate()
