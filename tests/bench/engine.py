"""Runs requests through scheduler and engine in this process, as the worker does, and times them."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from engine_worker.config import WorkerConfig, plan_sizes, scheduler_limits
from engine_worker.constraints.masks import MaskFiller
from engine_worker.constraints.matcher import RequestConstraint
from engine_worker.loading import engine_options
from engine_worker.models import Model, build_model
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.c_types import MAX_IN_FLIGHT, PAGE_SIZE
from engine_worker.runtime.loop import EngineLoop, LoopOutputs
from engine_worker.runtime.records import EngineInfo, Int32Array, MaskArray, Sampling, StepBatch, StepResult
from engine_worker.runtime.step import StepPacker
from engine_worker.scheduler.request import Request
from engine_worker.scheduler.scheduler import Scheduler


class TimedEngine:
    """Engine that adds up the time its steps took on the device."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.device_ns: list[int] = []

    def bind_slot(self, slot: int, sampling: Sampling, prompt: Int32Array, sampled: Int32Array) -> None:
        self._engine.bind_slot(slot, sampling, prompt, sampled)

    def release_slot(self, slot: int) -> None:
        self._engine.release_slot(slot)

    def submit(self, batch: StepBatch) -> None:
        self._engine.submit(batch)

    def set_masks(self, masks: MaskArray) -> None:
        self._engine.set_masks(masks)

    def collect(self) -> StepResult:
        result = self._engine.collect()
        self.device_ns.append(result.device_ns)
        return result


@dataclass
class Arrival:
    """Tokens that one step brought, and when."""

    at: float
    tokens: int
    steps: int


class Bench:
    """A loaded engine. Each `run` has a scheduler and a loop of its own, so nothing is cached from run to run."""

    def __init__(self, config: WorkerConfig, model: Model, engine: Engine) -> None:
        self.model = model
        self.info: EngineInfo = engine.info()
        self._config = config
        self._engine = TimedEngine(engine)
        self._sizes = plan_sizes(config, model.config.max_position_embeddings, model.mixed.kv)

    def run(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, constraints: Sequence[RequestConstraint] = ()
    ) -> tuple[float, list[Arrival], list[int]]:
        """Start all prompts at once, greedy, past every stop id; with `constraints`, one for each prompt.

        Returns when they were submitted, what arrived, and each step's device time in ns.
        """
        self._engine.device_ns.clear()
        arrivals: list[Arrival] = []
        open_requests = len(prompts)
        done = threading.Event()

        def deliver(outputs: LoopOutputs) -> None:
            nonlocal open_requests
            arrivals.append(Arrival(time.perf_counter(), len(outputs.tokens), len(self._engine.device_ns)))
            open_requests -= len(outputs.finishes)
            if open_requests == 0:
                done.set()

        limits = replace(scheduler_limits(self._config, self._sizes), prefix_cache=False)
        packer = StepPacker(limits.max_step_tokens, limits.max_running, self._sizes.max_context // PAGE_SIZE)
        masks = MaskFiller(limits.max_running, self.info.vocab)
        loop = EngineLoop(self._engine, Scheduler(limits), packer, masks, deliver, max_in_flight=MAX_IN_FLIGHT)
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            request = _request(i, prompt, max_tokens)
            request.constraint = constraints[i] if constraints else None
            loop.submit(request)
        loop.start()
        done.wait()
        loop.stop()
        for slot in range(limits.max_running):
            self._engine.release_slot(slot)  # the next run's scheduler takes every slot for free
        return start, arrivals, list(self._engine.device_ns)


def _request(number: int, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        key=(0, number),
        tokens=array("i", prompt),
        prompt_len=len(prompt),
        max_tokens=max_tokens,
        stop_ids=frozenset(),
        sampling=Sampling(prompt_len=len(prompt)),
    )


@contextmanager
def loaded(model_dir: Path, synthetic_seed: int | None = None, threads: int = 0) -> Iterator[tuple[Bench, float]]:
    """The bench and the seconds from the checkpoint's directory to an engine that can step.

    With `synthetic_seed` the weights are made up. threads: 0 for one on each core.
    """
    config = WorkerConfig(model=model_dir, threads=threads, max_running=16, step_tokens=512, max_context=2048)
    start = time.perf_counter()
    model = build_model(config.model, config.kv_dtype, synthetic_seed=synthetic_seed)
    sizes = plan_sizes(config, model.config.max_position_embeddings, model.mixed.kv)
    with Engine.create(engine_options(config, model, sizes)) as engine:
        yield Bench(config, model, engine), time.perf_counter() - start
