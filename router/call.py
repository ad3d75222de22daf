"""What a front, gRPC or HTTP, tells the core of one call of a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from glmserve.service.identity import Identity


class Call(Protocol):
    """`caller`: whose call it is, already authenticated. `headers`: names in lower case."""

    @property
    def protocol(self) -> Literal["grpc", "http"]: ...

    @property
    def caller(self) -> Identity: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: there is none."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Run `callback` exactly once when the call ends, however it ends, even while a response is being written."""

    async def accept(self, headers: Mapping[str, str]) -> None:
        """Send `headers` to the client before anything else."""
