"""How much the router takes on. What is beyond it, or cannot be done in time, is refused at once, never queued here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from glmserve.service.identity import Identity
from glmserve.service.status import OverloadedError, UnavailableError
from router.dispatch.tenants import Tenant, Tenants, retry_ms
from router.dispatch.worker_pool import Outlook


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`max_prompt_tokens`: of requests that have no token yet. `max_queue_s`: of the expected wait.

    `retry_after_ms`: told to who is refused while no pace has been measured.
    """

    max_requests: int
    max_prompt_tokens: int
    max_queue_s: float
    retry_after_ms: int


def class_share(priority: int) -> float:
    """The part of each limit that a request may fill: the last is kept for the more urgent.

    Below 0: batch, half. 0: normal, nine tenths. Above 0: urgent, all.
    """
    if priority < 0:
        return 0.5
    return 0.9 if priority == 0 else 1.0


class Admission:
    """Counts requests and prompt tokens in flight, and prices refusals with what the workers achieve."""

    def __init__(self, limits: AdmissionLimits, tenants: Tenants, outlook: Callable[[], Outlook]) -> None:
        self._limits = limits
        self._tenants = tenants
        self._outlook = outlook
        self._requests = 0
        self._prompt_tokens = 0
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, identity: Identity, priority: int, deadline_s: float | None, places: int = 1) -> Ticket:
        """Take `places`, one for each choice. `deadline_s`: seconds left to the request; None: no end.

        A request of more places than there are is taken when it is alone. Raises OverloadedError: a limit is reached,
        or the queue outlasts the deadline. Raises PermissionDeniedError: the caller may not have this priority, or so
        many places. Raises UnavailableError: closed.
        """
        if self.closed:
            raise UnavailableError("the router is shutting down; try another")
        outlook, share = self._outlook(), class_share(priority)
        most = math.ceil(self._limits.max_requests * share)
        if self._requests and self._requests + places > most:
            raise self._refusal(
                f"{self._requests} requests in flight, at most {most} at this priority",
                outlook.total.places_s(self._requests + places - most),
                "requests",
            )
        longest_s = self._limits.max_queue_s * share
        if outlook.queue_s > longest_s:
            raise self._refusal(
                f"the expected wait is {outlook.queue_s:.1f} s, at most {longest_s:g} s at this priority",
                outlook.queue_s - longest_s,
                "queue",
            )
        self._check_deadline(deadline_s, outlook.queue_s, outlook)
        place_s = outlook.total.places_s(1) or self._limits.retry_after_ms / 1000
        tenant = self._tenants.enter(identity, priority, place_s, places)
        self._requests += places
        self._idle.clear()
        return Ticket(self, tenant, share, places)

    def close(self) -> None:
        """Refuse new requests from now on."""
        self.closed = True

    async def wait_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    def add_prompt(self, ticket: Ticket, tokens: int, least_tokens: int, deadline_s: float | None) -> None:
        """Count a prompt; one larger than the limit is taken when it is alone. Raises OverloadedError."""
        outlook = self._outlook()
        most = math.ceil(self._limits.max_prompt_tokens * ticket.share)
        if self._prompt_tokens and self._prompt_tokens + tokens > most:
            raise self._refusal(
                f"{self._prompt_tokens} prompt tokens wait, with {tokens} more they exceed {most} at this priority",
                outlook.total.prefill_s(self._prompt_tokens + tokens - most),
                "prompt_tokens",
            )
        decode_s = outlook.pace.decode_s(max(0, least_tokens - 1), outlook.running)
        self._check_deadline(deadline_s, outlook.queue_s + outlook.pace.prefill_s(tokens) + decode_s, outlook)
        self._tenants.add_prompt(ticket.tenant, tokens)
        self._prompt_tokens += tokens

    def computed(self, tokens: int) -> None:
        """A prompt waits no longer."""
        self._prompt_tokens -= tokens

    def leave(self, tenant: Tenant, completion_tokens: int, places: int) -> None:
        """Give back what a request took."""
        self._tenants.charge(tenant, completion_tokens)
        self._tenants.leave(tenant, places)
        self._requests -= places
        if self._requests == 0:
            self._idle.set()

    def _check_deadline(self, deadline_s: float | None, expected_s: float, outlook: Outlook) -> None:
        """An idle worker takes anything: its pace is of another time, and is measured again by taking it."""
        if outlook.running and deadline_s is not None and deadline_s < expected_s:
            raise self._refusal(
                f"the deadline is in {deadline_s:.3g} s, and the least expected is {expected_s:.3g} s",
                expected_s - deadline_s,
                "deadline",
            )

    def _refusal(self, message: str, wait_s: float, reason: str) -> OverloadedError:
        return OverloadedError(message, retry_ms(wait_s) if wait_s > 0 else self._limits.retry_after_ms, reason)


class Ticket:
    """One request's places, to be given back exactly once."""

    __slots__ = ("_admission", "_places", "_waiting_tokens", "share", "tenant")

    def __init__(self, admission: Admission, tenant: Tenant, share: float, places: int) -> None:
        self._admission = admission
        self._places = places
        self._waiting_tokens = 0
        self.tenant = tenant
        self.share = share

    def add_prompt(self, tokens: int, least_tokens: int, deadline_s: float | None) -> None:
        """Count the prompt of this request, which generates `least_tokens` or more. Raises OverloadedError."""
        self._admission.add_prompt(self, tokens, least_tokens, deadline_s)
        self._waiting_tokens = tokens

    def began(self) -> None:
        """The first token is there: the prompt waits no longer. Idempotent."""
        self._admission.computed(self._waiting_tokens)
        self._waiting_tokens = 0

    def leave(self, completion_tokens: int) -> None:
        """Give the places back."""
        self.began()
        self._admission.leave(self.tenant, completion_tokens, self._places)
