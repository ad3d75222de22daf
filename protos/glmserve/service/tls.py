"""TLS on both ends of a connection, from PEM files that are read again when they change."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from glmserve.service.reload import Reloaded
from glmserve.service.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents that fit together."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """`cert` (with its chain) and `key`, both or neither: who we are. `ca`: who signs for the other side."""

    cert: Path | None
    key: Path | None
    ca: Path | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of the files that are named."""
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)

    def read(self) -> Pem:
        """Raises SettingsError naming the file: missing, unreadable, not PEM, or a key of another certificate."""
        pem = Pem(*(None if path is None else _read(path) for path in (self.cert, self.key, self.ca)))
        if self.cert is not None and self.key is not None:
            _check_pair(self.cert, self.key)
        if self.ca is not None:
            _check_ca(self.ca)
        return pem


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """For a server with `cert` and `key`; with `ca` its clients must have a certificate too.

    Each new connection gets the files' content of that moment. Raises SettingsError: they cannot be used.
    """
    reloaded = Reloaded(files.paths, files.read)
    handed_over = reloaded.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal handed_over
        pem = reloaded.current()
        if pem is handed_over:
            return None
        handed_over = pem
        return _server_configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(handed_over),
        fetch,  # type: ignore[arg-type]  # the published type leaves out None, which means: no change
        require_client_authentication=files.ca is not None,
    )


class Channels:
    """Opens channels to services: with TLS that trusts `ca`, or in plain text if no files are given."""

    def __init__(self, files: TlsFiles | None, server_name: str | None = None) -> None:
        """`server_name`: what the server's certificate must be for, if not the host of its address.

        Raises SettingsError: the files cannot be used.
        """
        self._reloaded = None if files is None else Reloaded(files.paths, files.read)
        self._name_options = [] if server_name is None else [("grpc.ssl_target_name_override", server_name)]

    def open(self, address: str, options: Sequence[tuple[str, object]]) -> grpc.aio.Channel:
        """A new channel, with the files' content of this moment: a channel keeps the certificates it began with."""
        if self._reloaded is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(
            address, channel_credentials(self._reloaded.current()), options=[*options, *self._name_options]
        )


def channel_credentials(pem: Pem) -> grpc.ChannelCredentials:
    """A client's: it trusts `ca`, and shows `cert` if there is one."""
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


def _server_configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.key is not None and pem.cert is not None
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None


def _check_pair(cert: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{key} is not the key of the certificate {cert}") from None
        raise SettingsError(f"{cert} and {key} are no certificate and key in PEM: {error.reason}") from None
    except OSError as error:
        raise SettingsError(f"cannot read {cert} and {key}: {error.strerror}") from None
    except _EncryptedKeyError:
        raise SettingsError(f"{key} is encrypted; a key without a password is needed") from None


class _EncryptedKeyError(Exception):
    pass


def _no_password() -> bytes:
    raise _EncryptedKeyError


def _check_ca(ca: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=ca)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(f"{ca} holds no certificates in PEM: {error}") from None
