"""uvicorn's HTTP protocol with bounds on connections and on the time that the head of a request may take."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http.exchange import TRANSPORT

_HEAD_S = 10.0


def bounded_protocol(max_connections: int) -> type[H11Protocol]:
    """The class for a server that holds so many connections; further ones are closed at once."""

    class Bounded(H11Protocol):
        """A connection whose request has no whole head 10 s after its first byte, or the connection, is closed."""

        _accepted = False
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._accepted = len(self.server_state.connections) < max_connections
            if not self._accepted:
                transport.abort()
                return
            super().connection_made(transport)
            self.app_state = {**self.app_state, TRANSPORT: transport}
            self._watch_head()

        def data_received(self, data: bytes) -> None:
            if self._accepted:
                super().data_received(data)
                self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._accepted:
                self._stop_timer()
                super().connection_lost(exc)

        def _watch_head(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Bounded
