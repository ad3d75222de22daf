"""glmserve on Modal: one host of GPUs, a volume with the checkpoint, gRPC and HTTP to the world.

    modal run deploy/modal_app.py                        download, build, validate, smoke, benchmark
    modal run deploy/modal_app.py --steps smoke          any of them alone, with commas
    modal deploy deploy/modal_app.py                     serve

Chosen by the environment when the app is built, because that is when Modal fixes them:

    GLM_MODAL_GPU      B200:8 (default), H200:8, H100:8; H100 is enough for the embedded model
    GLM_MODAL_MODEL    zai-org/GLM-4.7-FP8 (default), or the name of an embedded model
    GLM_MODAL_KEYS     name of a Modal secret whose GLM_KEYS_TOML is a keys file (`glm key create`); without it HTTP
                       asks for Modal's own proxy tokens, and gRPC, which has none, is not let out
    GLM_MODAL_MIN, GLM_MODAL_MAX    containers kept, and at most; 0 and 1

`modal dict items glmserve` lists the gRPC address of each container. Modal starts and keeps containers by HTTP requests
alone: for clients that speak only gRPC set GLM_MODAL_MIN to 1.

Each step is a function of deploy.steps, as `glm deploy` calls it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import modal

if TYPE_CHECKING:
    from deploy.local import LocalCluster

SOURCE = Path(__file__).resolve().parent.parent
INSTALLED = "/opt/glmserve"
VOLUME = Path("/volume")
KEYS_FILE = Path("/run/glmserve-keys.toml")
HTTP_PORT = 8000
GRPC_PORT = 50050
# Modal kills a container 30 s after it has asked it to stop: time for running requests, then for the services to end.
DRAIN_SECONDS = 20
_MINUTE = 60
_IGNORED = [".git", ".venv", "build", "engine_worker/lib", "**/__pycache__", "**/*.pyc"]


@dataclass(frozen=True)
class Deployment:
    """What is served on what."""

    gpu: str = "B200:8"
    model: str = "zai-org/GLM-4.7-FP8"
    keys_secret: str | None = None
    min_containers: int = 0
    max_containers: int = 1

    @classmethod
    def from_environment(cls) -> Deployment:
        """Raises ValueError naming the variable that is wrong."""
        gpu = os.environ.get("GLM_MODAL_GPU", cls.gpu)
        if not re.fullmatch(r"[A-Z0-9-]+(:[1-8])?", gpu):
            raise ValueError(f"GLM_MODAL_GPU is {gpu!r}; allowed: a GPU of Modal and a count of 1 to 8, like H200:8")
        return cls(
            gpu=gpu,
            model=os.environ.get("GLM_MODAL_MODEL", cls.model),
            keys_secret=os.environ.get("GLM_MODAL_KEYS") or None,
            min_containers=_count("GLM_MODAL_MIN", cls.min_containers, least=0),
            max_containers=_count("GLM_MODAL_MAX", cls.max_containers, least=1),
        )

    @property
    def num_gpus(self) -> int:
        return int(self.gpu.partition(":")[2] or 1)

    @property
    def name(self) -> str:
        """Of the checkpoint's directory in the volume."""
        return self.model.rpartition("/")[2]

    @property
    def worker_args(self) -> list[str]:
        """All GPUs in one worker: attention and experts divided among all of them.

        Several have room for long contexts and many requests.
        """
        ranks = str(self.num_gpus)
        room = ["--max-context", "65536", "--max-running", "128", "--step-tokens", "2048"] if self.num_gpus > 1 else []
        return ["--device", "cuda", "--tp", ranks, "--ep", ranks, *room]

    def router_args(self, keys_file: Path | None) -> list[str]:
        """Plain text inside the container: Modal's tunnel and proxy end TLS before it."""
        args = ["--http-listen", f"0.0.0.0:{HTTP_PORT}", "--drain-s", str(DRAIN_SECONDS), "--insecure"]
        return args if keys_file is None else [*args, "--keys-file", str(keys_file)]


def _count(variable: str, default: int, least: int) -> int:
    given = os.environ.get(variable, str(default))
    if not given.isdecimal() or int(given) < least:
        raise ValueError(f"{variable} is {given!r}; allowed: a number of containers, {least} or more")
    return int(given)


DEPLOYMENT = Deployment.from_environment()

image = (
    modal.Image.from_registry("nvidia/cuda:13.0.1-devel-ubuntu24.04", add_python="3.11")
    .apt_install("curl", "g++", "make", "xz-utils", "libnccl2", "libnccl-dev")
    .add_local_dir(SOURCE, INSTALLED, copy=True, ignore=_IGNORED)
    # VENV: into the image's own Python, which Modal runs.
    .run_commands(
        f"cd {INSTALLED} && make build/protos.stamp build/native.stamp cuda toolchains VENV=/usr/local",
    )
    .env({"GLM_CACHE_DIR": str(VOLUME), "GLM_TOOLCHAINS": f"{INSTALLED}/build/toolchains"})
    .env({name: value for name, value in os.environ.items() if name.startswith("GLM_MODAL_")})
    .workdir(INSTALLED)
)
volume = modal.Volume.from_name("glmserve", create_if_missing=True)
app = modal.App("glmserve", image=image)

_on_cpu: dict[str, Any] = {"volumes": {str(VOLUME): volume}, "cpu": 16.0, "timeout": 6 * 60 * _MINUTE}
_on_gpus: dict[str, Any] = {"volumes": {str(VOLUME): volume}, "gpu": DEPLOYMENT.gpu, "timeout": 2 * 60 * _MINUTE}


@app.function(**_on_cpu)
def download(revision: str = "main") -> str:
    """Every shard into the volume, verified; goes on where an earlier call ended."""
    from deploy.steps.download import download as run  # noqa: PLC0415 - not on the caller's machine

    try:
        return str(run(DEPLOYMENT.model, VOLUME, revision))
    finally:
        volume.commit()


@app.function(**_on_gpus)
def build() -> list[dict[str, Any]]:
    """What the image was built with, and whether it runs on these GPUs."""
    from dataclasses import asdict  # noqa: PLC0415

    from deploy.steps.doctor import CUDA_TABLE, UNUSABLE, examine, missing  # noqa: PLC0415

    for gpu in range(DEPLOYMENT.num_gpus):
        findings = examine(gpu)
        table = next(finding for finding in findings if finding.part == CUDA_TABLE)
        absent = [*missing(findings), *([] if table.found and UNUSABLE not in table.found else [table])]
        if absent:
            raise RuntimeError("; ".join(f"{finding.part}: {finding.found or finding.remedy}" for finding in absent))
    return [asdict(finding) for finding in findings]


@app.function(**_on_cpu)
def validate(sequences: int = 64, context: int = 4096) -> dict[str, Any]:
    """The checkpoint's headers against the model, without reading a weight; memory of each rank."""
    from deploy.steps.validate import Serving  # noqa: PLC0415
    from deploy.steps.validate import validate as run  # noqa: PLC0415

    ranks = DEPLOYMENT.num_gpus
    return _kept("validate", run(_checkpoint(), Serving(ranks, ranks, "auto", sequences, context)))


@app.function(**_on_gpus)
def smoke() -> dict[str, Any]:
    """A short prompt; fails unless the answer has Paris in it."""
    from deploy.steps.smoke import smoke as run  # noqa: PLC0415

    return _kept("smoke", run(_checkpoint(), DEPLOYMENT.worker_args))


@app.function(**_on_gpus)
def benchmark() -> dict[str, Any]:
    """Prefill and decode, each by itself; JSON and plots into the volume."""
    import asyncio  # noqa: PLC0415

    from deploy.local import local_cluster  # noqa: PLC0415
    from deploy.steps.benchmark import Cases, draw_scaling, pair_for  # noqa: PLC0415
    from deploy.steps.benchmark import benchmark as run  # noqa: PLC0415

    cases = Cases()
    with local_cluster(pair_for(_checkpoint(), cases, DEPLOYMENT.worker_args), print) as cluster:
        report = asyncio.run(run(cluster.router, cases))
    draw_scaling(report, _reports())
    return _kept("benchmark", report)


@app.cls(
    volumes={str(VOLUME): volume},
    gpu=DEPLOYMENT.gpu,
    secrets=[modal.Secret.from_name(DEPLOYMENT.keys_secret)] if DEPLOYMENT.keys_secret else [],
    min_containers=DEPLOYMENT.min_containers,
    max_containers=DEPLOYMENT.max_containers,
    scaledown_window=15 * _MINUTE,
    timeout=24 * 60 * _MINUTE,
    startup_timeout=60 * _MINUTE,
)
@modal.concurrent(max_inputs=1000)
class Server:
    """Worker and router in one container. HTTP through Modal's web endpoint, gRPC through a tunnel that ends TLS.

    No memory snapshot: it would hold neither GPU memory nor the services, which are processes of their own.
    """

    @modal.enter()
    def start(self) -> None:
        """Returns once a warm-up generation has gone through: only then does Modal route to the container."""
        self._open = ExitStack()
        self._open.enter_context(serving())

    @modal.web_server(HTTP_PORT, startup_timeout=60 * _MINUTE, requires_proxy_auth=DEPLOYMENT.keys_secret is None)
    def serve(self) -> None:
        """The router listens already: `start` waited for it."""

    @modal.exit()
    def stop(self) -> None:
        """Drain, and end the services."""
        self._open.close()


@contextmanager
def serving() -> Iterator[LocalCluster]:
    """Worker and router for the time of the block, and with keys a tunnel to the router's gRPC.

    At the end, in this order: the address is no longer listed, the router drains, the worker ends, the tunnel is cut.
    """
    from deploy.local import LocalOptions, local_cluster  # noqa: PLC0415

    options = LocalOptions(
        _checkpoint(),
        listen=f"0.0.0.0:{GRPC_PORT}",
        worker_args=DEPLOYMENT.worker_args,
        router_args=DEPLOYMENT.router_args(_keys_file()),
        echo=True,
        start_seconds=3600.0,
    )
    if DEPLOYMENT.keys_secret is None:
        with local_cluster(options, print) as cluster:
            yield cluster
    else:
        with modal.forward(GRPC_PORT, h2_enabled=True) as tunnel, local_cluster(options, print) as cluster:
            host, port = tunnel.tls_socket
            with _listed(f"{host}:{port}"):
                yield cluster


@app.local_entrypoint()
def main(steps: str = "download,build,validate,smoke,benchmark") -> None:
    """Run steps in order; the first that fails ends it."""
    import json  # noqa: PLC0415

    known: dict[str, Any] = {
        "download": download,
        "build": build,
        "validate": validate,
        "smoke": smoke,
        "benchmark": benchmark,
    }
    for step in steps.split(","):
        if step not in known:
            raise SystemExit(f"--steps: {step!r} is not a step; allowed: {', '.join(known)}")
    for step in steps.split(","):
        print(f"== {step} of {DEPLOYMENT.model} on {DEPLOYMENT.gpu}")
        print(json.dumps(known[step].remote(), indent=2))


def _checkpoint() -> Path:
    volume.reload()
    directory = VOLUME / "models" / DEPLOYMENT.name
    if not directory.is_dir():
        raise RuntimeError(f"{directory} is not in the volume; run the step download first")
    return directory


def _reports() -> Path:
    directory = VOLUME / "reports" / DEPLOYMENT.name
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _kept(step: str, report: dict[str, Any]) -> dict[str, Any]:
    import json  # noqa: PLC0415

    (_reports() / f"{step}.json").write_text(json.dumps(report, indent=2) + "\n")
    volume.commit()
    return report


def _keys_file() -> Path | None:
    """The secret as the file that the router reads. RuntimeError: without its keys anybody would be let in."""
    if DEPLOYMENT.keys_secret is None:
        return None
    keys = os.environ.get("GLM_KEYS_TOML")
    if not keys:
        raise RuntimeError(
            f"the secret {DEPLOYMENT.keys_secret!r} has no GLM_KEYS_TOML: put a keys file there (`glm key create`)"
        )
    KEYS_FILE.touch(mode=0o600)
    KEYS_FILE.write_text(keys)
    return KEYS_FILE


@contextmanager
def _listed(address: str) -> Iterator[None]:
    """This container's gRPC address, where clients find it, for the time of the block."""
    listed = modal.Dict.from_name("glmserve", create_if_missing=True)
    container = os.environ["MODAL_TASK_ID"]
    listed[container] = address
    print(f"gRPC with TLS at {address}")
    try:
        yield
    finally:
        listed.pop(container)
