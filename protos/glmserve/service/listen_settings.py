"""What a service that listens lets be set: its address, TLS, and what may be reached from outside."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import grpc
from pydantic import Field, model_validator

from glmserve.service.settings import ServiceSettings
from glmserve.service.tls import TlsFiles, server_credentials


class ListenSettings(ServiceSettings):
    """Beyond loopback a service speaks TLS and knows its callers, or `insecure` is stated."""

    listen: str
    tls_cert: Path | None = Field(
        None, description="This service's certificate with its chain, PEM; with tls_key. Read again when it changes."
    )
    tls_key: Path | None = Field(None, description="Key of tls_cert, PEM, without a password.")
    tls_client_ca: Path | None = Field(
        None, description="CA certificates, PEM: every client must show a certificate that one of them signed."
    )
    insecure: bool = Field(False, description="Allow plain text and unknown callers beyond loopback.")
    stop_with_stdin: bool = Field(
        False, description="Stop, as at SIGTERM, when standard input ends: a launcher's pipe ends however it dies."
    )
    reflection: bool | None = Field(
        None, description="Answer gRPC reflection; unset: only when listening on loopback alone."
    )

    @property
    def knows_callers(self) -> bool:
        """Whether a stranger is turned away."""
        return self.tls_client_ca is not None

    @property
    def tls(self) -> bool:
        """Whether clients must speak TLS."""
        return self.tls_cert is not None

    @property
    def reflects(self) -> bool:
        """Whether reflection is served."""
        return is_loopback(self.listen) if self.reflection is None else self.reflection

    def credentials(self) -> grpc.ServerCredentials | None:
        """None: plain text. Raises SettingsError: a file cannot be used."""
        if self.tls_cert is None:
            return None
        return server_credentials(TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca))

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca: needs tls_cert and tls_key")
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        for name, address in self._addresses.items():
            self._check_address(name, address)
        return self

    def _check_address(self, name: str, address: str) -> None:
        if self.insecure or is_loopback(address):
            return
        if self.tls_cert is None:
            raise ValueError(
                f"{name}: {address} is not loopback, where plain text is allowed; set tls_cert and tls_key, or insecure"
            )
        if not self.knows_callers:
            raise ValueError(
                f"{name}: {address} is not loopback, where anybody may call; set {self._callers_setting}, or insecure"
            )

    @property
    def _addresses(self) -> Mapping[str, str]:
        """Where clients are served, by setting."""
        return {"listen": self.listen}

    @property
    def _callers_setting(self) -> str:
        return "tls_client_ca"


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT can be reached from this machine only. A name other than localhost is not looked up."""
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
