"""The launcher, with small programs in the services' place: the working directory is where modules are sought first."""

import json
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from deploy import child
from deploy.child import Child, readable
from deploy.errors import ServiceError
from deploy.local import LocalCluster, LocalOptions, local_cluster

# A health server that keeps its arguments and writes its ready file, as both services do.
HEALTHY = """
import argparse, json, os, pathlib, signal, sys
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
parser = argparse.ArgumentParser()
parser.add_argument("--listen")
parser.add_argument("--ready-file", type=pathlib.Path)
known, _ = parser.parse_known_args()
server = grpc.server(futures.ThreadPoolExecutor(2))
servicer = health.HealthServicer()
servicer.set("", health_pb2.HealthCheckResponse.SERVING)
health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
port = server.add_insecure_port(known.listen)
server.start()
pathlib.Path("NAME.args").write_text(json.dumps(sys.argv[1:]))
pathlib.Path("NAME.pid").write_text(str(os.getpid()))
partial = known.ready_file.with_suffix(".partial")
partial.write_text(json.dumps({"address": f"127.0.0.1:{port}", "pid": os.getpid(), "tls": False}))
partial.rename(known.ready_file)
signal.sigwait({signal.SIGTERM})
with open("stopped", "a") as log:
    log.write("NAME\\n")
"""
# Asked for its load, it says once each how far it is, and then serves.
LOADING = """
states = ["it loads, 10 % done", "it loads, 10 % done", "it loads, 20 % done"]
servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
def get_load(request, context):
    state = states.pop(0)
    if not states:
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    context.abort(grpc.StatusCode.UNAVAILABLE, state)
handlers = {"GetLoad": grpc.unary_unary_rpc_method_handler(get_load)}
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("glmserve.engine.v1.EngineService", handlers),))
server.start()
"""
BLOCK_TERM = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
REFUSING = "import sys; sys.exit('glm router: listen: no such address')"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the programs: NAME.py is `python -m NAME`."""
    monkeypatch.chdir(tmp_path)
    for name in ("engine_worker", "router"):
        (tmp_path / f"{name}.py").write_text(BLOCK_TERM + HEALTHY.replace("NAME", name))
    return tmp_path


def pair(**options: Any) -> AbstractContextManager[LocalCluster]:
    return local_cluster(LocalOptions(Path("/model"), **options), lambda _: None)


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_pair_is_started_with_its_flags_and_stopped_in_order(programs: Path) -> None:
    told: list[str] = []
    options = LocalOptions(Path("/model"), worker_args=["--threads", "1"], router_args=["--drain-s", "2"])
    with local_cluster(options, told.append) as cluster:
        cluster.check()
        worker = json.loads((programs / "engine_worker.args").read_text())
        router = json.loads((programs / "router.args").read_text())
    assert worker[:4] == ["--model", "/model", "--listen", "127.0.0.1:0"]
    assert worker[-2:] == ["--threads", "1"]
    assert router[-4:] == ["--worker", cluster.workers[0], "--drain-s", "2"]
    assert cluster.router != cluster.workers[0]
    assert told == ["starting the worker", "starting the router"]
    assert (programs / "stopped").read_text() == "router\nengine_worker\n"


def test_several_workers_are_all_named_to_the_router(programs: Path) -> None:
    told: list[str] = []
    with local_cluster(LocalOptions(Path("/model"), workers=3), told.append) as cluster:
        router = json.loads((programs / "router.args").read_text())
        assert len(set(cluster.workers)) == 3
    assert router[-2:] == ["--worker", ",".join(cluster.workers)]
    assert told == ["starting the worker 1", "starting the worker 2", "starting the worker 3", "starting the router"]
    assert (programs / "stopped").read_text().splitlines() == ["router", *["engine_worker"] * 3]


def test_how_far_a_worker_is_with_loading_is_told(programs: Path) -> None:
    worker = programs / "engine_worker.py"
    worker.write_text(worker.read_text().replace("server.start()\n", LOADING))
    told: list[str] = []
    with local_cluster(LocalOptions(Path("/model")), told.append):
        loading = ["worker: it loads, 10 % done", "worker: it loads, 20 % done"]
        assert told == ["starting the worker", *loading, "starting the router"]


def test_a_router_that_asks_for_tls_is_not_asked_for_its_health(programs: Path) -> None:
    tls_router = (
        (programs / "router.py").read_text().replace('"tls": False', '"tls": True').replace(".SERVING", ".UNKNOWN")
    )
    (programs / "router.py").write_text(tls_router)
    with pair(start_seconds=20.0) as cluster:
        cluster.check()
        assert cluster.router


def test_an_error_inside_the_block_stops_the_pair(programs: Path) -> None:
    with pytest.raises(KeyboardInterrupt), pair():
        raise KeyboardInterrupt
    assert (programs / "stopped").read_text() == "router\nengine_worker\n"


def test_sigterm_stops_the_pair(programs: Path) -> None:
    with pytest.raises(SystemExit) as caught, pair():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    assert (programs / "stopped").read_text() == "router\nengine_worker\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_refused_start_tells_the_last_line_and_keeps_exit_code_2(programs: Path) -> None:
    (programs / "router.py").write_text(
        "import sys; print('noise\\nglm router: no such file', file=sys.stderr); sys.exit(2)"
    )
    with (
        pytest.raises(ServiceError, match="router exited with status 2: glm router: no such file") as caught,
        pair(),
    ):
        pass
    assert caught.value.exit_code == 2
    assert (programs / "stopped").read_text() == "engine_worker\n"


def test_a_service_that_is_killed_later_is_noticed(programs: Path) -> None:
    with pytest.raises(ServiceError, match="the worker was killed by SIGKILL") as caught, pair() as cluster:
        os.kill(int((programs / "engine_worker.pid").read_text()), signal.SIGKILL)
        cluster.watch()
    assert caught.value.exit_code == 1


def test_a_service_that_never_serves_is_given_up(programs: Path) -> None:
    (programs / "engine_worker.py").write_text("import signal; signal.pause()")
    with pytest.raises(ServiceError, match=r"the worker was not ready within 0\.3 s"), pair(start_seconds=0.3):
        pass


def test_a_service_that_ignores_sigterm_is_killed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_SECONDS", 0.1)
    (programs / "deaf.py").write_text(BLOCK_TERM + "open('ready', 'w'); signal.pause()")
    deaf = Child("deaf", "deaf", [])
    while not (programs / "ready").exists():
        deaf.check()
    deaf.stop()
    assert not is_running(deaf.pid)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"event": "boom", "level": "error", "timestamp": "t", "service": "w", "error": "x"}\n', "boom error=x"),
        ("plain text \n", "plain text"),
        ("[1]\n", "[1]"),
    ],
)
def test_log_lines_are_shown_for_people(line: str, expected: str) -> None:
    assert readable(line) == expected
