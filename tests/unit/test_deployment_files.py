"""Container, compose, Kubernetes and Nix files: rendered, held against schemas and the services' own settings."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from deploy.cli.main import app
from deploy.models.catalog import DEFAULT_MODEL
from engine_worker.config import WorkerConfig
from router.config import RouterConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = ("base", "overlays/h100x8", "overlays/embedded", "download", "bench")
PROJECT = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
CONFIGS: dict[str, type[RouterConfig] | type[WorkerConfig]] = {"router": RouterConfig, "worker": WorkerConfig}


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name: str) -> str:
    """A command that came with a package."""
    return str(Path(sys.executable).parent / name)


def rendered(overlay: str) -> list[dict[str, Any]]:
    text = run(tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / overlay))
    return [document for document in yaml.safe_load_all(text) if document]


def pod_specs(overlay: str) -> list[dict[str, Any]]:
    return [
        document["spec"]["template"]["spec"]
        for document in rendered(overlay)
        if document["kind"] in ("Deployment", "StatefulSet", "Job")
    ]


def ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def compose() -> dict[str, Any]:
    """The services of the compose file, by name."""
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    assert set(services) == set(CONFIGS)
    return services


def accepted(service: str, args: Sequence[str], tmp_path: Path) -> RouterConfig | WorkerConfig:
    """The service's settings, with files and directories that exist in the container made up here."""
    local = []
    for arg in args:
        flag, _, value = arg.partition("=")
        if value.startswith("/"):
            path = tmp_path / value.strip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if flag == "--model" else path.touch()
            value = str(path)
        local.append(f"{flag}={value}" if value else flag)
    return CONFIGS[service].load(local, prog=f"glm {service}")


def parsed(command: Sequence[str]) -> str:
    """The path of a `glm` command whose arguments the command line takes; typer exits otherwise."""
    found, args = typer.main.get_command(app), list(command[1:])
    path = [command[0]]
    while isinstance(found, typer.core.TyperGroup):
        path.append(args.pop(0))
        found = found.commands[path[-1]]
    found.make_context("", args)
    return " ".join(path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_follow_the_schemas_of_kubernetes(overlay: str, tmp_path: Path) -> None:
    text = run(tool("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / overlay))
    (tmp_path / "all.yaml").write_text(text)
    run(tool("kubernetes-validate"), "--kubernetes-version", "1.34", "--strict", str(tmp_path / "all.yaml"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_run_without_root_and_without_privileges(overlay: str) -> None:
    for spec in pod_specs(overlay):
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("overlay", ["base", "overlays/h100x8", "overlays/embedded"])
def test_services_take_the_flags_of_the_manifests(overlay: str, tmp_path: Path) -> None:
    seen = set()
    for spec in pod_specs(overlay):
        for container in spec["containers"]:
            if container["name"] in CONFIGS:
                accepted(container["name"], container["args"], tmp_path / container["name"])
                seen.add(container["name"])
    assert seen == set(CONFIGS)


@pytest.mark.parametrize(("overlay", "command"), [("bench", "glm bench serve"), ("download", "glm deploy download")])
def test_the_command_line_takes_what_jobs_run(overlay: str, command: str) -> None:
    (container,) = pod_specs(overlay)[0]["containers"]
    assert parsed([*container["command"], *container["args"]]) == command


def test_the_command_line_takes_what_probes_run() -> None:
    worker = next(spec for spec in pod_specs("base") if spec["containers"][0]["name"] == "worker")["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        command = worker[probe]["exec"]["command"]
        assert parsed(command) == "glm probe"
        assert f"--target=localhost:{ports(worker)['grpc']}" in command
    for service in compose().values():
        assert parsed(service["healthcheck"]["test"][1:]) == "glm probe"


def test_the_embedded_overlay_downloads_the_model_that_it_serves() -> None:
    models = {arg for spec in pod_specs("overlays/embedded") for arg in spec["containers"][0]["args"] if "model" in arg}
    assert models == {f"--model={DEFAULT_MODEL}", f"--model=/volume/models/{DEFAULT_MODEL}"}


def test_ports_of_services_and_policies_are_those_of_the_containers() -> None:
    documents = rendered("base")
    pods = {
        document["metadata"]["name"]: document["spec"]["template"]
        for document in documents
        if document["kind"] in ("Deployment", "StatefulSet")
    }
    listening = {name: set(ports(pod["spec"]["containers"][0]).values()) for name, pod in pods.items()}
    for document in documents:
        if document["kind"] in ("Service", "NetworkPolicy"):
            name, spec = document["metadata"]["name"], document["spec"]
            incoming = (
                spec["ports"] if document["kind"] == "Service" else [p for i in spec["ingress"] for p in i["ports"]]
            )
            assert {port["port"] for port in incoming} <= listening[name]
            selector = spec.get("selector") or spec["podSelector"]["matchLabels"]
            assert selector.items() <= pods[name]["metadata"]["labels"].items()


def test_images_are_of_this_version() -> None:
    images = {
        container["image"] for overlay in OVERLAYS for spec in pod_specs(overlay) for container in spec["containers"]
    }
    images |= {service["image"] for service in compose().values()}
    assert images == {f"glmserve-{name}:{PROJECT['version']}" for name in CONFIGS}


def test_the_real_model_gets_eight_gpus_and_as_many_ranks() -> None:
    worker = next(spec for spec in pod_specs("overlays/h100x8") if spec["containers"][0]["name"] == "worker")
    container = worker["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"--tp=8", "--ep=8", "--device=cuda", "--max-context=65536", "--max-running=128"} <= set(container["args"])


def test_a_pod_has_time_to_drain() -> None:
    for spec in pod_specs("base"):
        container = spec["containers"][0]
        fields = CONFIGS[container["name"]].model_fields
        drain = fields["drain_s" if container["name"] == "router" else "drain_seconds"]
        assert spec["terminationGracePeriodSeconds"] > drain.default


def test_compose_passes_flags_that_the_services_take(tmp_path: Path) -> None:
    for name, service in compose().items():
        args = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", arg) for arg in service["command"]]
        accepted(name, args, tmp_path / name)
        assert service["cap_drop"] == ["ALL"]


def test_the_container_file_passes_its_linter() -> None:
    run(tool("hadolint"), str(DEPLOY / "container" / "Containerfile"))


def test_images_are_pinned_and_run_as_nobody() -> None:
    lines = (DEPLOY / "container" / "Containerfile").read_text().splitlines()
    stages: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            _, base, _, name = line.split()
            assert ":" in base
            assert not base.endswith(":latest")
            stages[name] = []
        elif stages:
            stages[name].append(line)
    for name in CONFIGS:
        assert "USER 65532:65532" in stages[name]


def test_the_nix_shell_parses() -> None:
    nix = shutil.which("nix-instantiate")
    if nix is None:
        pytest.skip("nix-instantiate is not installed (Debian: nix-bin)")
    run(nix, "--parse", str(DEPLOY / "nix" / "shell.nix"))
