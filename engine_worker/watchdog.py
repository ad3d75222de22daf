"""Liveness is a step heartbeat: a port that answers proves nothing while a step does not end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine_worker.errors import EngineStuckError
from engine_worker.runtime.records import EngineProgress

_MIN_SLEEP_S = 0.01
_LOOKS = 8  # at the ranks, in the time that they are given


async def wait_until_stuck(step_age_s: Callable[[], float], limit_s: float) -> EngineStuckError:
    """Returns once no step has ended for `limit_s` while there was something to do.

    An age grows no faster than time, so that sleeping for what is left of the limit misses nothing.
    """
    while (age_s := step_age_s()) <= limit_s:  # noqa: ASYNC110 - the engine's thread has no time to tell of each step
        await asyncio.sleep(max(limit_s - age_s, _MIN_SLEEP_S))
    return EngineStuckError(
        f"the engine is stuck: a step has not ended for {age_s:.1f} s, step_timeout_seconds is {limit_s:g}"
    )


async def wait_until_stalled(progress: Callable[[], EngineProgress], limit_s: float) -> EngineStuckError:
    """Returns once no rank has begun an operation for `limit_s` within a step: one hangs, and the others wait for it.

    Counted in looks, not by the clock: a process that was stopped for a while finds its ranks where they were.
    """
    seen, unchanged = progress(), 0
    while unchanged < _LOOKS:
        await asyncio.sleep(limit_s / _LOOKS)
        now = progress()
        unchanged = unchanged + 1 if now.where and now.calls == seen.calls else 0
        seen = now
    return EngineStuckError(
        f"the engine is stuck: no rank has ended an operation for {limit_s:g} s (stall_seconds): {seen.where}"
    )
