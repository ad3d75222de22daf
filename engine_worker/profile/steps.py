"""Whole steps, as the worker runs them: one is queued while the one before runs."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from engine_worker.profile.shape import StepShape, bind, first_batch, next_batch
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.c_types import MAX_IN_FLIGHT
from engine_worker.runtime.records import Sampling

# Sampled as the model's makers recommend, so that sampling costs what it costs in service.
SAMPLING = Sampling(temperature=1.0, top_p=0.95)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step on the device and from one collected result to the next, medians; and the fastest."""

    device_s: float
    wall_s: float
    fastest_s: float
    steps: int

    @property
    def gap_s(self) -> float:
        """Between the end of one step's work on the device and the begin of the next one's."""
        return max(0.0, self.wall_s - self.device_s)


def time_steps(engine: Engine, shape: StepShape, steps: int, sampling: Sampling = SAMPLING) -> StepTime:
    """Run `steps` steps of the shape after two to warm up."""
    bind(engine, shape, sampling)
    batch = first_batch(shape, engine.info().vocab)
    following = next_batch(shape) if shape.decode else batch
    device, walls = [], []
    submitted, collected, last = 0, 0, 0.0
    while collected < steps + 2:
        while submitted < steps + 2 and submitted - collected < MAX_IN_FLIGHT:
            engine.submit(batch if submitted == 0 else following)
            submitted += 1
        device.append(engine.collect().device_ns / 1e9)
        now = time.perf_counter()
        walls.append(now - last)
        collected, last = collected + 1, now
    return StepTime(statistics.median(device[2:]), statistics.median(walls[2:]), min(device[2:]), steps)
