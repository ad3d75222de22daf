"""Many requests of all kinds, a third of them aborted, through scheduler and engine: nothing may be left behind.

`GLM_TEST_TABLE=cuda python -m tests.golden.mixed_requests [--tp 2 [--exchange all_to_all]] [NAME ...]` runs 1,000 on
each golden checkpoint, or on those named, and says how much of the (first) device's memory was lost.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import random
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from engine_worker.models import Model, build_model
from engine_worker.models.exchange import Exchange, Exchanges
from engine_worker.models.layout import Parallelism
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.c_types import MAX_IN_FLIGHT, PAGE_SIZE
from engine_worker.runtime.ranks import rank_options
from engine_worker.runtime.records import EngineOptions, Sampling
from engine_worker.runtime.step import StepPacker, submit_step
from engine_worker.scheduler.limits import Limits
from engine_worker.scheduler.request import Finish, Outputs, Reason, Request, RequestKey, StepPlan
from engine_worker.scheduler.scheduler import Scheduler
from tests.golden.cases import CASES
from tests.golden.table import MAX_CONTEXT, TABLE

RUNNING = 12
# Too few for what runs at once, so that requests are preempted.
LIMITS = Limits(num_pages=14, page_size=PAGE_SIZE, max_context=MAX_CONTEXT, max_running=RUNNING, max_step_tokens=48)


@dataclass
class Run:
    """Submits `requests` a few at a time, and aborts some while they wait, run or have just ended."""

    engine: Engine
    requests: list[Request]
    aborts: dict[RequestKey, int] = field(default_factory=dict)  # after so many tokens
    limits: Limits = LIMITS

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.finishes: dict[RequestKey, Finish] = {}
        self.tokens: dict[RequestKey, list[int]] = {request.key: [] for request in self.requests}
        self.steps = 0
        self._packer = StepPacker(LIMITS.max_step_tokens, RUNNING, MAX_CONTEXT // PAGE_SIZE)
        self._in_flight: deque[StepPlan] = deque()
        self._coming = deque(self.requests)

    def go(self) -> None:
        while self._coming or self.scheduler.num_open or self._in_flight:
            while self._coming and self.scheduler.num_open < 2 * RUNNING:
                self._submit(self._coming.popleft())
            while len(self._in_flight) < MAX_IN_FLIGHT and (plan := self.scheduler.schedule(self.steps)) is not None:
                submit_step(self.engine, self._packer, plan)
                self._in_flight.append(plan)
            if self._in_flight:
                self._collect()
        self.scheduler.check()
        for slot in range(RUNNING):
            self.engine.release_slot(slot)

    def _submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        if self.aborts.get(request.key) == 0:
            self._abort(request.key)

    def _collect(self) -> None:
        result = self.engine.collect()
        self.steps += 1
        self._note(self.scheduler.commit(self._in_flight.popleft(), result.token_ids.tolist(), self.steps))

    def _note(self, outputs: Outputs) -> None:
        for request, token, _ in outputs.tokens:
            self.tokens[request.key].append(token)
        for finish in outputs.finishes:
            self._finish(finish)
        for key, count in self.aborts.items():
            if key not in self.finishes and len(self.tokens[key]) >= max(1, count):
                self._abort(key)

    def _abort(self, key: RequestKey) -> None:
        finish = self.scheduler.abort(key, Reason.ABORTED, self.steps)
        if finish is not None:
            self._finish(finish)

    def _finish(self, finish: Finish) -> None:
        assert finish.key not in self.finishes, f"{finish.key} ended twice"
        self.finishes[finish.key] = finish


def make_requests(count: int, vocab: int, seed: int = 0) -> list[Request]:
    """Greedy ones, seeded ones and ones with penalties; prompts that share beginnings."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(2 * PAGE_SIZE)]
    requests = []
    for number in range(count):
        own = [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]
        prompt = shared[: rng.choice((0, 0, PAGE_SIZE, 2 * PAGE_SIZE))] + own
        kinds = (
            Sampling(),
            Sampling(seed=number, temperature=1.0, top_p=0.9),
            Sampling(seed=number, temperature=0.7, top_k=20, repetition_penalty=1.2, presence_penalty=0.3),
        )
        sampling = replace(kinds[number % len(kinds)], prompt_len=len(prompt))
        requests.append(
            Request(
                (0, number),
                array("i", prompt),
                len(prompt),
                rng.randint(1, MAX_CONTEXT - len(prompt)),
                frozenset(),
                sampling,
            )
        )
    return requests


def make_aborts(requests: list[Request], seed: int = 1) -> dict[RequestKey, int]:
    rng = random.Random(seed)
    return {request.key: rng.randint(0, request.max_tokens) for request in requests if rng.random() < 1 / 3}


def engine_options(model: Model) -> EngineOptions:
    return EngineOptions(
        kernels_path=kernel_table_path(TABLE),
        ranks=rank_options(model, first_gpu=None if TABLE == "cpu" else 0),
        tensors=model.tensors,
        max_rows=LIMITS.max_step_tokens,
        max_samples=RUNNING,
        max_slots=RUNNING,
        max_context=MAX_CONTEXT,
        num_pages=LIMITS.num_pages,
        num_threads=1,
    )


def run_mixed(engine: Engine, vocab: int, count: int) -> Run:
    requests = make_requests(count, vocab)
    run = Run(engine, requests, make_aborts(requests))
    run.go()
    return run


@functools.cache
def memory_probe() -> Any:
    """Opened once: what it takes itself must not count."""
    from tests.bench.cuda_bench import CudaBench  # noqa: PLC0415 - not without a GPU

    return CudaBench()


def free_device_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory_probe().call("glm_cuda_memory_info", ctypes.byref(free), ctypes.byref(total))
    return free.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int)
    parser.add_argument("--exchange", choices=get_args(Exchange), default="replicate")
    parser.add_argument("--requests", type=int, default=1000)
    asked = parser.parse_args()
    for case in CASES:
        if case.name not in (asked.names or [case.name]):
            continue
        exchanges = Exchanges(asked.exchange, asked.exchange)
        model = build_model(case.directory, "auto", Parallelism(asked.tp, asked.ep), exchanges=exchanges)
        with Engine.create(engine_options(model)) as engine:
            run_mixed(engine, model.config.vocab_size, 20)
            before = free_device_bytes() if TABLE == "cuda" else 0
            run = run_mixed(engine, model.config.vocab_size, asked.requests)
            lost = before - free_device_bytes() if TABLE == "cuda" else 0
        allocator = run.scheduler.allocator
        aborted = sum(finish.reason is Reason.ABORTED for finish in run.finishes.values())
        print(
            f"{case.name:24} {len(run.finishes)} requests, {aborted} aborted, {run.steps} steps, "
            f"{run.scheduler.totals.preemptions} preemptions; pages free {allocator.num_free} and cached "
            f"{allocator.num_cached} of {LIMITS.num_pages}; device memory lost {lost}",
            flush=True,
        )


if __name__ == "__main__":
    main()
