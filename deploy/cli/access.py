"""How commands reach a router that asks for TLS or an API key."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import typer

from glmserve.service.listen_settings import is_loopback
from glmserve.service.settings import SettingsError
from glmserve.service.tls import TlsFiles, channel_credentials

KEY_VARIABLE = "GLM_API_KEY"


@dataclass(frozen=True)
class Access:
    """TLS if `tls_ca` is given; `tls_cert` and `tls_key` for routers that ask for a certificate."""

    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_key: str | None = None

    def channel(self, address: str) -> grpc.Channel:
        """A channel to `address` that sends the key with each call. BadParameter: what is given cannot be used."""
        credentials, metadata = self.credentials(address), self.metadata()
        channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
        return grpc.intercept_channel(channel, _SendKey(metadata[0])) if metadata else channel

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call has to carry."""
        key = self.api_key or os.environ.get(KEY_VARIABLE)
        return (("authorization", f"Bearer {key}"),) if key else ()

    def credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """For a channel to `address`; None: plain text. BadParameter: what is given cannot be used."""
        if self.tls_ca is None:
            if self.tls_cert or self.tls_key:
                raise typer.BadParameter("needs --tls-ca", param_hint="--tls-cert / --tls-key")
            if self.metadata() and not is_loopback(address):
                raise typer.BadParameter(
                    f"would be sent to {address} in plain text; give --tls-ca", param_hint=f"--api-key / {KEY_VARIABLE}"
                )
            return None
        if (self.tls_cert is None) != (self.tls_key is None):
            raise typer.BadParameter("give both or neither", param_hint="--tls-cert / --tls-key")
        try:
            pem = TlsFiles(self.tls_cert, self.tls_key, self.tls_ca).read()
        except SettingsError as error:
            raise typer.BadParameter(str(error), param_hint="--tls-ca / --tls-cert / --tls-key") from None
        return channel_credentials(pem)


PLAIN_TEXT = Access()


class _SendKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    def __init__(self, metadatum: tuple[str, str]) -> None:
        self._metadatum = metadatum

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), self._metadatum])
