"""The router's connection to one worker: keeps a Serve stream up, and says so when it is not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
import structlog

from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from glmserve.service.pace import UNKNOWN, Pace
from glmserve.service.status import UnavailableError
from glmserve.service.tls import Channels
from router.dispatch.breaker import Breaker
from router.dispatch.serve_session import LinkLostError, ServeSession
from router.dispatch.token_stream import TokenStream

log = structlog.get_logger()

_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_CONNECT_TIMEOUT_S = 10.0
# Logprobs of many sequences and merged steps can pass gRPC's default of 4 MiB.
_MAX_RESPONSE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", int(_MIN_BACKOFF_S * 1000)),
    ("grpc.min_reconnect_backoff_ms", int(_MIN_BACKOFF_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(_MAX_BACKOFF_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", _MAX_RESPONSE_BYTES),
)


class WorkerLink:
    """Requests go to the session that is up; while none is, they are refused at once.

    `session`: the one that is up; None: none is. `down_reason`: why none is. `retired`: nothing new goes there, and a
    lost stream is not opened again.
    """

    def __init__(
        self, address: str, channels: Channels, vocab_size: int, heartbeat_s: float, on_change: Callable[[], None]
    ) -> None:
        """`vocab_size`: of the model directory; a worker with another one serves another model and is not used.

        `on_change` is called whenever `serving` may have changed.
        """
        self.address = address
        self.breaker = Breaker()
        self.retired = False
        self.down_reason = "not connected yet"
        self._channels = channels
        self._vocab_size = vocab_size
        self._heartbeat_s = heartbeat_s
        self._on_change = on_change
        self.session: ServeSession | None = None
        self._info: engine_pb2.GetInfoResponse | None = None

    @property
    def serving(self) -> bool:
        """A request submitted now would reach a worker that takes it."""
        return self.session is not None and self.session.serving and not self.retired

    @property
    def info(self) -> engine_pb2.GetInfoResponse:
        """What the worker says of itself. Raises UnavailableError: it takes no requests now."""
        if not self.serving or self._info is None:
            raise self._down()
        return self._info

    @property
    def longest(self) -> int:
        """Tokens of prompt and completion together that it takes, as it last said; 0 if it never did."""
        info = self._info
        if info is None:
            return 0
        # The last token needs no place in a page. 0 pages: not told.
        return min(info.max_context, info.total_pages * info.page_size + 1) if info.total_pages else info.max_context

    @property
    def open_requests(self) -> int:
        """Of all routers, as the worker last said, and of this one since."""
        session = self.session
        if session is None or session.load is None:
            return 0
        reported = session.load.running_requests + session.load.waiting_requests + session.new_requests
        return max(session.open_requests, reported)

    @property
    def running_requests(self) -> int:
        """How many of them run: the load is of a moment ago, and says nothing of what began since."""
        return 0 if self._info is None else min(self.open_requests, self._info.max_running_requests)

    @property
    def pace(self) -> Pace:
        """How fast the worker works, as it last said."""
        load = None if self.session is None else self.session.load
        if load is None:
            return UNKNOWN
        return Pace(load.prefill_tokens_per_s, load.decode_tokens_per_s, load.tokens_per_request)

    @property
    def queue_s(self) -> float:
        """How long a request submitted now would wait, by the worker's pace and what is before it."""
        session = self.session
        if session is None or session.load is None or self._info is None:
            return 0.0
        return self.pace.queue_s(
            free_places=self._info.max_running_requests - session.load.running_requests,
            waiting_requests=session.load.waiting_requests + session.new_requests,
            waiting_prompt_tokens=session.load.waiting_prompt_tokens + session.new_prompt_tokens,
        )

    async def run(self) -> None:
        """Connect, serve, reconnect with backoff, until cancelled or retired."""
        backoff_s = _MIN_BACKOFF_S
        while not self.retired:
            # A channel for each attempt, so that each has the certificates of its time.
            async with self._channels.open(self.address, _CHANNEL_OPTIONS) as channel:
                if await self._connect_and_serve(channel):
                    backoff_s = _MIN_BACKOFF_S
            # Jitter keeps the routers of a restarted worker from arriving together.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            backoff_s = min(backoff_s * 1.6, _MAX_BACKOFF_S)

    def submit(self, submit: engine_pb2.Submit) -> tuple[ServeSession, TokenStream]:
        """Send a request; its request_id is set here. The session is the one to abort and release it on.

        Raises UnavailableError: the worker takes no requests now.
        """
        session = self.session
        if session is None or not self.serving:
            raise self._down()
        self.breaker.began()
        return session, session.submit(submit)

    def _down(self) -> UnavailableError:
        return UnavailableError(f"no engine worker at {self.address}: {self.down_reason}")

    async def _connect_and_serve(self, channel: grpc.aio.Channel) -> bool:
        """One attempt. True if the worker was reached, however it ended."""
        connected = False
        reason = ""
        try:
            await self._connect(channel)
            connected = True
            await self._serve(channel)
        except* grpc.aio.AioRpcError as group:
            reason = _first_rpc_error(group)
        except* LinkLostError as group:
            reason = str(group.exceptions[0])
        if connected or reason != self.down_reason:
            log.warning("worker_down", worker=self.address, reason=reason)
        self.down_reason = reason
        return connected

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        engine = engine_pb2_grpc.EngineServiceStub(channel)
        info = await engine.GetInfo(engine_pb2.GetInfoRequest(), timeout=_CONNECT_TIMEOUT_S)
        if info.vocab_size != self._vocab_size:
            raise LinkLostError(
                f"it serves {info.model_name} with vocab_size {info.vocab_size}, but the router's model has "
                f"{self._vocab_size}; start both on the same model directory"
            )
        self._info = info
        log.info("worker_connected", worker=self.address, model=info.model_name, version=info.version)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        assert self._info is not None
        self.down_reason = "it is starting or draining"
        session = ServeSession(channel, self._heartbeat_s, self._info.step_timeout_ms, self._on_change)
        self.session = session
        try:
            await session.run()
        finally:
            if session.failed:
                self.breaker.failed()
            self.session = None
            self._on_change()


def _first_rpc_error(group: BaseExceptionGroup[grpc.aio.AioRpcError]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, grpc.aio.AioRpcError)
    return f"{error.code().name}: {error.details()}"
