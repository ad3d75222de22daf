"""Workers and a router on this machine: started in order, awaited through gRPC health, watched, stopped together."""

import contextlib
import json
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.child import Child
from deploy.errors import ServiceError
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc

ANY_PORT = "127.0.0.1:0"
_START_POLL_SECONDS = 0.02
_WATCH_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class LocalOptions:
    """What to start. The args are further flags for each service; with `echo` the services' logs go to our stderr."""

    model: Path
    listen: str = ANY_PORT
    workers: int = 1
    worker_args: Sequence[str] = ()
    router_args: Sequence[str] = ()
    echo: bool = False
    start_seconds: float = 600.0


class LocalCluster:
    """Workers and one router. `workers` and `router` are their addresses, HOST:PORT, once started.

    `http`: URL of the router's HTTP front; None: it has none.
    """

    def __init__(self, options: LocalOptions, directory: Path) -> None:
        self.workers: list[str] = []
        self.router = ""
        self.http: str | None = None
        self._options = options
        self._directory = directory  # of the ready files
        self._deadline = time.monotonic() + options.start_seconds
        self._children: list[Child] = []

    def start(self, report: Callable[[str], None]) -> None:
        """Return when all serve; `report` is told what is being waited for. Raises ServiceError."""
        options = self._options
        names = ["worker"] if options.workers == 1 else [f"worker {number + 1}" for number in range(options.workers)]
        for name in names:
            report(f"starting the {name}")
            worker = self._launch(name, "engine_worker", ANY_PORT, options.worker_args, report)
            self.workers.append(worker["address"])
        report("starting the router")
        router_args = ("--worker", ",".join(self.workers), *options.router_args)
        router = self._launch("router", "router", options.listen, router_args, report)
        self.router = router["address"]
        if router.get("http") is not None:
            self.http = f"{'https' if router['tls'] else 'http'}://{router['http']}"

    @property
    def router_pid(self) -> int:
        """Process id of the router, once started."""
        return self._children[-1].pid

    def check(self) -> None:
        """ServiceError if one has ended."""
        for child in self._children:
            child.check()

    def watch(self) -> NoReturn:
        """Never return; ServiceError when a service ends by itself."""
        while True:
            self.check()
            time.sleep(_WATCH_POLL_SECONDS)

    def stop(self) -> None:
        """The router first, so that nothing new reaches a worker. An interrupt while waiting kills all."""
        try:
            for child in reversed(self._children):
                child.stop()
        except BaseException:
            for child in self._children:
                child.kill()
            raise

    def _launch(
        self, name: str, module: str, listen: str, args: Sequence[str], report: Callable[[str], None]
    ) -> dict[str, Any]:
        """Start a service, wait for it, and return what it says in its ready file.

        It is waited for until it is healthy, or, if only a client with certificates may ask for that, until it listens.
        """
        ready = self._directory / f"{name}.json"
        flags = ["--model", str(self._options.model), "--listen", listen, "--ready-file", str(ready)]
        # Stopped even if we are killed, and so cannot.
        flags += ["--stop-with-stdin", *args]
        self._children.append(Child(name, module, flags, self._options.echo))
        while not ready.exists():
            self._wait_a_little(name)
        found: dict[str, Any] = json.loads(ready.read_text())
        if not found["tls"]:
            self._wait_healthy(name, found["address"], report)
        return found

    def _wait_healthy(self, name: str, address: str, report: Callable[[str], None]) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        with grpc.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            told = None
            while True:
                with contextlib.suppress(grpc.RpcError):
                    if health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == serving:
                        return
                state = _state(channel)
                if state not in (told, None):
                    report(f"{name}: {state}")
                told = state
                self._wait_a_little(name)

    def _wait_a_little(self, name: str) -> None:
        self.check()
        if time.monotonic() > self._deadline:
            raise ServiceError(f"the {name} was not ready within {self._options.start_seconds:g} s")
        time.sleep(_START_POLL_SECONDS)


def _state(channel: grpc.Channel) -> str | None:
    """What a worker says of itself while it is not ready; None of a router, which has nothing to say."""
    try:
        engine_pb2_grpc.EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest(), timeout=5)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        return str(error.details()) if error.code() is grpc.StatusCode.UNAVAILABLE else None
    return "warming up"


@contextlib.contextmanager
def local_cluster(options: LocalOptions, report: Callable[[str], None]) -> Iterator[LocalCluster]:
    """Run all for the time of the `with` block. SIGTERM and SIGHUP end the block, and so the services."""
    with tempfile.TemporaryDirectory(prefix="glmserve-") as directory, _signals_that_exit():
        cluster = LocalCluster(options, Path(directory))
        try:
            cluster.start(report)
            yield cluster
        finally:
            cluster.stop()


@contextlib.contextmanager
def _signals_that_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that what is open gets closed. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
