"""Certificate files: what is said of bad ones, and when changed ones are taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from structlog.testing import capture_logs

from engine_worker.config import WorkerConfig
from glmserve.service.listen_settings import is_loopback
from glmserve.service.reload import Reloaded
from glmserve.service.settings import SettingsError
from glmserve.service.tls import TlsFiles
from router.config import RouterConfig
from tests.certificates import Authority


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return Authority(tmp_path).issue("server")


def test_a_missing_file_is_named(files: TlsFiles) -> None:
    for path in files.paths:
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(SettingsError, match=f"cannot read {path}: No such file"):
            files.read()
        path.write_bytes(content)
    files.read()


def test_an_unreadable_file_is_named(files: TlsFiles) -> None:
    assert files.key is not None
    files.key.unlink()
    files.key.mkdir()
    with pytest.raises(SettingsError, match=f"cannot read {files.key}: Is a directory"):
        files.read()


def test_the_key_of_another_certificate_is_named(files: TlsFiles, tmp_path: Path) -> None:
    other = Authority(tmp_path).issue("other")
    with pytest.raises(SettingsError, match=f"{other.key} is not the key of the certificate {files.cert}"):
        TlsFiles(files.cert, other.key, files.ca).read()


@pytest.mark.parametrize(
    "content", [b"", b"not PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_file_that_is_not_pem_is_named(files: TlsFiles, which: str, content: bytes) -> None:
    path: Path = getattr(files, which)
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=str(path)):
        files.read()


def test_a_key_with_a_password_is_refused_without_asking_for_it(files: TlsFiles) -> None:
    assert files.key is not None
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    pkcs8 = serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, encryption))
    with pytest.raises(SettingsError, match=f"{files.key} is encrypted"):
        files.read()


def test_changed_files_are_read_again_and_bad_ones_leave_the_last_good_value(files: TlsFiles, tmp_path: Path) -> None:
    reloaded = Reloaded(files.paths, files.read)
    first = reloaded.current()
    assert reloaded.current() is first
    assert files.cert is not None and files.key is not None
    renewed = Authority(tmp_path).issue("renewed")
    assert renewed.cert is not None and renewed.key is not None
    files.cert.write_bytes(renewed.cert.read_bytes())
    with capture_logs() as logs:
        assert reloaded.current() is first, "a certificate whose key has not come yet"
        assert reloaded.current() is first
    assert [(line["event"], str(files.key) in line["reason"]) for line in logs] == [("files_not_reloaded", True)]
    files.key.write_bytes(renewed.key.read_bytes())
    assert reloaded.current().cert == renewed.cert.read_bytes()
    files.key.unlink()
    assert reloaded.current().key == renewed.key.read_bytes()


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:0", True),
        ("127.8.0.1:5", True),
        ("localhost:5", True),
        ("[::1]:5", True),
        ("0.0.0.0:5", False),
        ("[::]:5", False),
        ("10.0.0.1:5", False),
        ("localhost.example.com:5", False),
        ("router:5", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


PAIR = {"tls_cert": "c", "tls_key": "k"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tls_cert": "c"}, "tls_cert and tls_key: give both or neither"),
        ({"tls_key": "k"}, "tls_cert and tls_key: give both or neither"),
        ({"tls_client_ca": "a"}, "tls_client_ca: needs tls_cert and tls_key"),
        ({"listen": "0.0.0.0:1"}, "listen: 0.0.0.0:1 is not loopback, where plain text is allowed"),
        ({"listen": "0.0.0.0:1", **PAIR}, "listen: 0.0.0.0:1 is not loopback, where anybody may call"),
    ],
)
def test_what_may_not_be_exposed_is_refused_by_both_services(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RouterConfig(model=Path("m"), worker="127.0.0.1:1", **settings)
    with pytest.raises(ValueError, match=text):
        WorkerConfig(model=Path("m"), **settings)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"worker_tls_cert": "c"}, "worker_tls_cert and worker_tls_key: give both or neither"),
        ({"worker_tls_cert": "c", "worker_tls_key": "k"}, "need worker_tls_ca"),
        ({"worker": "engine:1"}, "worker: engine:1 is not loopback, where plain text is allowed"),
    ],
)
def test_the_hop_to_the_worker_is_checked_as_well(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        RouterConfig(model=Path("m"), **{"worker": "127.0.0.1:1", **settings})


def test_what_is_protected_or_stated_insecure_may_be_exposed() -> None:
    protected: list[dict[str, Any]] = [
        {"insecure": True},
        {**PAIR, "tls_client_ca": "a", "worker_tls_ca": "a"},
        {**PAIR, "keys_file": "f", "worker_tls_ca": "a"},
    ]
    for settings in protected:
        config = RouterConfig(model=Path("m"), **{"worker": "engine:1", "listen": "0.0.0.0:1", **settings})
        assert not config.reflects
    assert RouterConfig(model=Path("m"), worker="127.0.0.1:1").reflects
