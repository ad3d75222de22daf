"""`glm generate` against a router that asks for TLS, a certificate and a key."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from deploy.cli.main import app
from glmserve.service.tls import TlsFiles, server_credentials
from tests.certificates import Authority
from tests.unit.cli_harness import ScriptedService, serve


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return Authority(tmp_path).issue("both")


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()  # type: ignore[abstract]  # the commands call no other method


@pytest.fixture
def target(service: ScriptedService, files: TlsFiles) -> Iterator[str]:
    server, address = serve(service, server_credentials(files))
    yield address
    server.stop(None).wait()


def generate(target: str, *args: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["generate", "--prompt", "x", "--target", target, *args], env=environment)


def certificates(files: TlsFiles) -> list[str]:
    return ["--tls-ca", str(files.ca), "--tls-cert", str(files.cert), "--tls-key", str(files.key)]


def test_a_certificate_and_a_key_are_shown(target: str, service: ScriptedService, files: TlsFiles) -> None:
    result = generate(target, *certificates(files), "--api-key", "glm_x")
    assert result.exit_code == 0, result.output
    assert result.stdout == " Paris.\n"
    assert service.metadata["authorization"] == "Bearer glm_x"


def test_the_key_may_come_from_the_environment(target: str, service: ScriptedService, files: TlsFiles) -> None:
    assert generate(target, *certificates(files), GLM_API_KEY="glm_y").exit_code == 0
    assert service.metadata["authorization"] == "Bearer glm_y"


def test_without_a_certificate_there_is_no_connection(target: str, files: TlsFiles) -> None:
    result = generate(target, "--tls-ca", str(files.ca))
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.stderr


def test_a_key_that_is_not_known_is_the_caller_s_fault(target: str, service: ScriptedService, files: TlsFiles) -> None:
    service.refusal = (grpc.StatusCode.UNAUTHENTICATED, "the API key is not known here")
    result = generate(target, *certificates(files), "--api-key", "glm_x")
    assert result.exit_code == 2
    assert "UNAUTHENTICATED: the API key is not known here" in result.stderr
