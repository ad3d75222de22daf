"""A certificate authority for tests, and the files that services read."""

from __future__ import annotations

from pathlib import Path

import grpc
import trustme

from glmserve.service.tls import TlsFiles, channel_credentials


class Authority:
    """Issues certificates for `localhost` and 127.0.0.1 into PEM files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ca = trustme.CA()

    def issue(self, name: str) -> TlsFiles:
        """NAME.crt, NAME.key and NAME-ca.crt, replaced as a deployment would: each by a rename, one after the other."""
        issued = self._ca.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return TlsFiles(
            self._replace(f"{name}.crt", chain),
            self._replace(f"{name}.key", issued.private_key_pem.bytes()),
            self._replace(f"{name}-ca.crt", self._ca.cert_pem.bytes()),
        )

    def credentials(self, name: str, *, own: bool = True) -> grpc.ChannelCredentials:
        """A client's that trusts this authority; with `own` it has a certificate of it."""
        files = self.issue(name)
        if own:
            return channel_credentials(files.read())
        return channel_credentials(TlsFiles(None, None, files.ca).read())

    def _replace(self, name: str, content: bytes) -> Path:
        path = self._directory / name
        partial = path.with_suffix(".new")
        partial.write_bytes(content)
        return partial.replace(path)
