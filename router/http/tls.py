"""TLS of the HTTP front, from the same files as gRPC's, read again when they change."""

from __future__ import annotations

import ssl

from glmserve.service.reload import Reloaded
from glmserve.service.settings import SettingsError
from glmserve.service.tls import TlsFiles


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """For a server with `cert` and `key`; with `ca` its clients must have a certificate too.

    Each new connection gets the files' content of that moment. Raises SettingsError: they cannot be used.
    """
    reloaded = Reloaded(files.paths, lambda: _load(files))
    context = reloaded.current()

    def renew(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = reloaded.current()

    context.sni_callback = renew
    return context


def _load(files: TlsFiles) -> ssl.SSLContext:
    files.read()
    assert files.cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key)
        if files.ca is not None:
            context.load_verify_locations(cafile=files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # replaced between the two readings
        raise SettingsError(f"cannot read {', '.join(map(str, files.paths))}: {error}") from None
    return context
