"""All workers that the router knows of, and which of them gets a request."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from glmserve.engine.v1 import engine_pb2
from glmserve.service.pace import UNKNOWN, Pace
from glmserve.service.status import UnavailableError
from glmserve.service.tls import Channels
from router.dispatch.affinity import Candidate, choose, prefix_key
from router.dispatch.discovery import Resolver, is_name, resolve
from router.dispatch.serve_session import ServeSession
from router.dispatch.signal import Signal
from router.dispatch.worker_link import WorkerLink

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`sources`: HOST:PORT or dns:///NAME:PORT; `resolve_s`: how often names are looked up."""

    sources: Sequence[str]
    vocab_size: int
    heartbeat_s: float
    resolve_s: float


class Outlook(NamedTuple):
    """What a request that comes now may expect. `queue_s`, `pace`, `running`: of the worker with the shortest queue;
    `total`: the pace of all workers together. `running` 0: the worker is idle."""

    queue_s: float
    pace: Pace
    running: int
    total: Pace


class WorkerPool:
    """Links come with the addresses that their sources name, and retire with them.

    `changed` fires whenever a worker may have begun or ceased to serve, and when it tells its load.
    """

    def __init__(self, settings: PoolSettings, channels: Channels, resolver: Resolver = resolve) -> None:
        self._settings = settings
        self._channels = channels
        self._resolver = resolver
        self._addresses: dict[str, frozenset[str]] = {}
        self._links: dict[str, WorkerLink] = {}
        self.changed = Signal()

    @property
    def num_serving(self) -> int:
        """Workers that take requests now."""
        return len(self._open_links())

    @property
    def info(self) -> engine_pb2.GetInfoResponse:
        """What one of the workers says of itself; all serve the same. Raises UnavailableError: none takes requests."""
        links = self._open_links()
        if not links:
            raise self._down()
        return links[0].info

    @property
    def longest(self) -> int:
        """Tokens of prompt and completion together that the largest worker takes, if it serves just now or not."""
        return max((link.longest for link in self._links.values() if not link.retired), default=0)

    def outlook(self) -> Outlook:
        """Without a worker there is no queue."""
        links = self._open_links()
        if not links:
            return Outlook(0.0, UNKNOWN, 0, UNKNOWN)
        best = min(links, key=lambda link: link.queue_s)
        paces = [link.pace for link in links]
        total = Pace(
            sum(pace.prefill_tokens_per_s for pace in paces),
            sum(pace.decode_tokens_per_s for pace in paces),
            max(pace.tokens_per_request for pace in paces),
        )
        return Outlook(best.queue_s, best.pace, best.running_requests, total)

    def pick(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 1,
        avoid: Collection[str] = (),
        left: Collection[ServeSession] = (),
        revision: str | None = None,
    ) -> WorkerLink:
        """A worker with room for the prompt and `max_tokens`.

        One in `avoid` only if there is no other, and none on a session in `left`. `revision`: of the model that a
        request began on; no other may go on with it. Raises UnavailableError: none takes such requests now.
        """
        length = len(prompt_ids) + max_tokens
        links = [
            link
            for link in self._open_links()
            if link.longest >= length
            and link.session not in left
            and (revision is None or link.info.model_revision == revision)
        ]
        if not links:
            raise self._down(length)
        links = [link for link in links if link.address not in avoid] or links
        if len(links) == 1:
            return links[0]
        candidates = [Candidate(link.address, link.info.max_running_requests, link.open_requests) for link in links]
        key = prefix_key(prompt_ids, max(1, links[0].info.page_size))
        return self._links[choose(key, candidates).name]

    async def run(self) -> None:
        """Follow the sources and keep the links up, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for source in self._settings.sources:
                if is_name(source):
                    tasks.create_task(self._follow(source, tasks))
                else:
                    self._take_addresses(source, frozenset((source,)), tasks)
            try:
                await asyncio.Event().wait()
            finally:
                # A link that loses its worker while it is cancelled hears of the loss only: TaskGroup drops the cancel.
                for link in self._links.values():
                    link.retired = True

    def _open_links(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.serving and link.breaker.passes]

    async def _follow(self, source: str, tasks: asyncio.TaskGroup) -> None:
        """A name that cannot be looked up keeps the addresses that it had."""
        failed = False
        while True:
            try:
                self._take_addresses(source, await self._resolver(source), tasks)
                failed = False
            except OSError as error:
                if not failed:
                    log.warning("workers_not_found", source=source, error=str(error))
                failed = True
            await asyncio.sleep(self._settings.resolve_s)

    def _take_addresses(self, source: str, addresses: frozenset[str], tasks: asyncio.TaskGroup) -> None:
        self._addresses[source] = addresses
        wanted = frozenset[str]().union(*self._addresses.values())
        for address in wanted - self._links.keys():
            link = self._links[address] = self._make_link(address)
            tasks.create_task(self._run_link(link))
        for address, link in self._links.items():
            if link.retired != (address not in wanted):
                link.retired = address not in wanted
                log.info("worker_retired" if link.retired else "worker_named_again", worker=address)
                self.changed.fire()

    def _make_link(self, address: str) -> WorkerLink:
        settings = self._settings
        return WorkerLink(address, self._channels, settings.vocab_size, settings.heartbeat_s, self.changed.fire)

    async def _run_link(self, link: WorkerLink) -> None:
        while not link.retired:
            await link.run()
        del self._links[link.address]
        self.changed.fire()

    def _down(self, length: int = 1) -> UnavailableError:
        """`length`: of the request that finds no worker."""
        reasons = [f"{address}: {_reason(link, length)}" for address, link in self._links.items()]
        return UnavailableError(f"no engine worker at {'; '.join(reasons) or ', '.join(self._settings.sources)}")


def _reason(link: WorkerLink, length: int) -> str:
    if link.retired:
        return "no longer named"
    if link.serving and link.longest < length:
        return f"it takes at most {link.longest} tokens, and this request may have {length}"
    if link.serving:
        return f"it fails requests, and is tried again in {link.breaker.reopens_in_s:.1f} s"
    return link.down_reason
