"""Looks at workers (GetLoad) and routers (their Prometheus endpoints), and tells rates from two looks."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from prometheus_client.parser import text_string_to_metric_families

from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc

_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Look:
    """Figures of one process at one time, by name; totals are since its start. `error`: it did not answer."""

    at: float
    figures: dict[str, float]
    error: str | None = None


class Subject:
    """One process. `kind`: worker or router."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address
        self.last: Look | None = None
        self._before: Look | None = None

    def add(self, look: Look) -> None:
        self._before, self.last = self.last, look

    def now(self, name: str) -> float | None:
        """The newest figure; None if there is none."""
        return None if self.last is None else self.last.figures.get(name)

    def rate(self, name: str) -> float | None:
        """A total's growth a second between the last two looks; None after a restart or a failed look."""
        if self.last is None or self._before is None:
            return None
        new, old = self.last.figures.get(name), self._before.figures.get(name)
        if new is None or old is None or new < old:
            return None
        return (new - old) / (self.last.at - self._before.at)

    def mean(self, name: str) -> float | None:
        """Mean of what a histogram saw between the last two looks; None if it saw nothing."""
        count, total = self.rate(f"{name}_count"), self.rate(f"{name}_sum")
        return total / count if count and total is not None else None


class Watch:
    """All subjects, looked at together. A context manager: it holds a channel to each worker."""

    def __init__(self, workers: Sequence[str], routers: Sequence[str]) -> None:
        self.subjects = [*(Subject("router", address) for address in routers)]
        self.subjects += [Subject("worker", address) for address in workers]
        self._stack = ExitStack()
        self._clients: dict[str, engine_pb2_grpc.EngineServiceStub] = {}

    def __enter__(self) -> Self:
        for subject in self.subjects:
            if subject.kind == "worker":
                channel = self._stack.enter_context(grpc.insecure_channel(subject.address))
                self._clients[subject.address] = engine_pb2_grpc.EngineServiceStub(channel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def look(self) -> None:
        """Ask every subject once. One that does not answer gets a look that says so."""
        for subject in self.subjects:
            subject.add(self._worker(subject.address) if subject.kind == "worker" else _router(subject.address))

    def _worker(self, address: str) -> Look:
        now = time.monotonic()
        try:
            load = self._clients[address].GetLoad(engine_pb2.GetLoadRequest(), timeout=_TIMEOUT_S).load
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            return Look(now, {}, f"{error.code().name}: {error.details()}")
        return Look(now, {field.name: float(getattr(load, field.name)) for field in load.DESCRIPTOR.fields})


def _router(address: str) -> Look:
    """Samples by name, summed over their labels; those of refusals also by reason."""
    now = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as reply:
            text = reply.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as error:
        return Look(now, {}, str(error))
    figures: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for name in _names(sample):
                figures[name] = figures.get(name, 0.0) + sample.value
    return Look(now, figures)


def _names(sample: Any) -> list[str]:
    labels = [f"{sample.name}:{sample.labels[key]}" for key in ("reason", "type") if key in sample.labels]
    return [sample.name, *labels]
