"""Container, compose, Kubernetes and Nix files: rendered, held against schemas and the services' own settings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_worker.config import WorkerConfig
from router.config import RouterConfig

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = ("base", "overlays/h100x8", "overlays/embedded", "bench")
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
            accepted(container["name"], container["args"], tmp_path / container["name"])
            seen.add(container["name"])
    assert seen == set(CONFIGS)


def test_the_real_model_gets_eight_gpus_and_as_many_ranks() -> None:
    worker = next(spec for spec in pod_specs("overlays/h100x8") if spec["containers"][0]["name"] == "worker")
    container = worker["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert {"--tp=8", "--ep=8", "--device=cuda"} <= set(container["args"])


def test_a_pod_has_time_to_drain() -> None:
    for spec in pod_specs("base"):
        container = spec["containers"][0]
        fields = CONFIGS[container["name"]].model_fields
        drain = fields["drain_s" if container["name"] == "router" else "drain_seconds"]
        assert spec["terminationGracePeriodSeconds"] > drain.default


def test_compose_passes_flags_that_the_services_take(tmp_path: Path) -> None:
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    for name in CONFIGS:
        args = [arg.replace("${GLM_RANKS:-8}", "8") for arg in services[name]["command"]]
        accepted(name, args, tmp_path / name)
        assert services[name]["cap_drop"] == ["ALL"]


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
