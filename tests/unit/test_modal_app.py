"""The Modal app without credentials: its object graph, its settings, its steps on a local volume."""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

pytest.importorskip("modal", reason="the app needs the extra modal: pip install 'glmserve[modal]'")

import modal

from deploy import modal_app
from deploy.modal_app import Deployment
from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from engine_worker.config import WorkerConfig
from glmserve.inference.v1 import inference_pb2, inference_pb2_grpc
from router.access.keys import key_hash, new_key
from router.config import RouterConfig

# It says so of a function that is called locally; the tests give it a volume of their own.
pytestmark = pytest.mark.filterwarnings("ignore:The .* function is executing locally:UserWarning")

STEPS = ("download", "build", "validate", "smoke", "benchmark")


class LocalVolume:
    """A directory needs neither."""

    def __init__(self) -> None:
        self.commits = 0

    def reload(self) -> None:
        pass

    def commit(self) -> None:
        self.commits += 1


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalVolume:
    volume = LocalVolume()
    monkeypatch.setattr(modal_app, "VOLUME", tmp_path)
    monkeypatch.setattr(modal_app, "volume", volume)
    monkeypatch.setattr(modal_app, "DEPLOYMENT", Deployment(gpu="H100", model=DEFAULT_MODEL))
    return volume


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deployment, "worker_args", ["--device", "cpu"])


def generate(router: str, key: str) -> str:
    """What the caller with this key gets."""
    sampling = inference_pb2.SamplingOptions(temperature=0.0, max_tokens=4)
    request = inference_pb2.GenerateRequest(prompt="The capital of France is", sampling=sampling)
    with grpc.insecure_channel(router) as channel:
        client = inference_pb2_grpc.InferenceServiceStub(channel)
        messages = client.Generate(request, metadata=(("authorization", f"Bearer {key}"),), timeout=60)
        return "".join(message.text for message in messages)


def load_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / DEFAULT_MODEL).symlink_to(resolve_model(DEFAULT_MODEL))


@pytest.mark.parametrize("step", STEPS)
def test_each_step_is_a_function_of_the_app_that_runs_alone(step: str) -> None:
    function = getattr(modal_app, step)
    assert isinstance(function, modal.Function)
    assert function.app is modal_app.app
    assert callable(function.local)


def test_the_server_is_a_class_of_the_app() -> None:
    assert isinstance(modal_app.Server, modal.Cls)


def test_by_default_it_is_the_real_model_on_eight_gpus() -> None:
    deployment = Deployment()
    assert (deployment.model, deployment.name) == ("zai-org/GLM-4.7-FP8", "GLM-4.7-FP8")
    assert deployment.worker_args[:6] == ["--device", "cuda", "--tp", "8", "--ep", "8"]


def test_a_worker_takes_its_arguments_and_has_room_for_long_contexts(tmp_path: Path) -> None:
    config = WorkerConfig.load(["--model", str(tmp_path), *Deployment().worker_args], prog="glm worker")
    assert (config.max_context, config.max_running, config.step_tokens) == (65536, 128, 2048)


def test_one_gpu_is_one_rank() -> None:
    assert Deployment(gpu="H100").worker_args == ["--device", "cuda", "--tp", "1", "--ep", "1"]


def test_the_router_takes_the_flags_that_it_is_started_with(tmp_path: Path) -> None:
    args = ["--model", str(tmp_path), "--worker", "127.0.0.1:1", *Deployment().router_args(tmp_path / "keys.toml")]
    config = RouterConfig.load(args, prog="glm router")
    assert config.http_listen == f"0.0.0.0:{modal_app.HTTP_PORT}"
    assert config.keys_file == tmp_path / "keys.toml"


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GPU": "H200:4", "MODEL": DEFAULT_MODEL, "KEYS": "keys", "MIN": "1", "MAX": "3"}.items():
        monkeypatch.setenv(f"GLM_MODAL_{name}", value)
    assert Deployment.from_environment() == Deployment("H200:4", DEFAULT_MODEL, "keys", 1, 3)


@pytest.mark.parametrize("gpu", ["H100:9", "H100:0", "eight", "H100:8:8"])
def test_a_gpu_that_modal_does_not_have_is_named(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLM_MODAL_GPU", gpu)
    with pytest.raises(ValueError, match=f"GLM_MODAL_GPU is '{gpu}'"):
        Deployment.from_environment()


@pytest.mark.parametrize(
    ("variable", "given"), [("GLM_MODAL_MIN", "-1"), ("GLM_MODAL_MAX", "0"), ("GLM_MODAL_MAX", "two")]
)
def test_a_number_of_containers_that_is_none_is_named(
    variable: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, given)
    with pytest.raises(ValueError, match=f"{variable} is '{given}'; allowed: a number of containers"):
        Deployment.from_environment()


def test_a_step_that_is_none_is_refused() -> None:
    code = "from deploy import modal_app; modal_app.main.info.raw_f('smoke,paint')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "'paint' is not a step; allowed: download, build, validate, smoke, benchmark" in done.stderr


def test_validation_on_a_local_volume(volume: LocalVolume, tmp_path: Path) -> None:
    load_checkpoint(tmp_path)
    report = modal_app.validate.local(sequences=2, context=32)
    assert len(report["ranks"]) == 1
    assert (tmp_path / "reports" / DEFAULT_MODEL / "validate.json").is_file()
    assert volume.commits == 1


def test_steps_before_the_download_say_so(volume: LocalVolume) -> None:
    with pytest.raises(RuntimeError, match="run the step download first"):
        modal_app.validate.local()


def test_the_build_step_fails_where_no_gpu_answers(volume: LocalVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RuntimeError, match="kernel table cuda"):
        modal_app.build.local()


def test_the_smoke_step_on_a_local_volume(
    volume: LocalVolume, on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_checkpoint(tmp_path)
    report = modal_app.smoke.local()
    assert "Paris" in report["text"]
    assert json.loads((tmp_path / "reports" / DEFAULT_MODEL / "smoke.json").read_text()) == report
    assert volume.commits == 1


def test_without_a_secret_there_are_no_keys_and_no_tunnel(volume: LocalVolume) -> None:
    assert modal_app._keys_file() is None


def test_a_secret_without_keys_lets_nobody_in(volume: LocalVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_app, "DEPLOYMENT", Deployment(keys_secret="glm-keys"))
    monkeypatch.delenv("GLM_KEYS_TOML", raising=False)
    with pytest.raises(RuntimeError, match="the secret 'glm-keys' has no GLM_KEYS_TOML"):
        modal_app._keys_file()


def test_serving_drains_before_the_tunnel_is_cut(
    volume: LocalVolume, on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_checkpoint(tmp_path)
    monkeypatch.setattr(modal_app, "DEPLOYMENT", Deployment(gpu="H100", model=DEFAULT_MODEL, keys_secret="glm-keys"))
    key, listed, ended = new_key(), dict[str, str](), list[str]()
    monkeypatch.setenv("GLM_KEYS_TOML", f'[[key]]\nname = "alice"\nhash = "{key_hash(key)}"\n')
    monkeypatch.setenv("MODAL_TASK_ID", "ta-1")
    monkeypatch.setattr(modal_app, "KEYS_FILE", tmp_path / "keys.toml")
    for name in ("GRPC_PORT", "HTTP_PORT"):
        monkeypatch.setattr(modal_app, name, 0)

    @contextmanager
    def forward(port: int, *, h2_enabled: bool) -> Iterator[SimpleNamespace]:
        assert h2_enabled
        yield SimpleNamespace(tls_socket=("tunnel.example", 443))
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", router_port)):
            pass
        ended.append("router, then tunnel")

    monkeypatch.setattr(modal, "forward", forward)
    monkeypatch.setattr(modal.Dict, "from_name", lambda name, create_if_missing: listed)
    with modal_app.serving() as cluster:
        router_port = int(cluster.router.rpartition(":")[2])
        assert listed == {"ta-1": "tunnel.example:443"}
        assert stat.S_IMODE((tmp_path / "keys.toml").stat().st_mode) == 0o600
        assert generate(cluster.router, key).startswith(" Paris")
        with pytest.raises(grpc.RpcError) as refused:
            generate(cluster.router, "wrong")
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (ended, listed) == (["router, then tunnel"], {})
