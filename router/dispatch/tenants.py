"""What each caller has in flight and has used lately, against the limits of its key."""

from __future__ import annotations

import time
from collections.abc import Callable

from glmserve.service.identity import Identity
from glmserve.service.status import OverloadedError, PermissionDeniedError

_MINUTE_S = 60.0


class TokenBucket:
    """Holds a minute's worth of tokens and fills steadily. What was used is taken when it is known, so it may owe."""

    def __init__(self, tokens_per_minute: int, now: float) -> None:
        self._capacity = float(tokens_per_minute)
        self._rate = tokens_per_minute / _MINUTE_S
        self._level = self._capacity
        self._at = now

    def take(self, tokens: int, now: float) -> None:
        """Tokens were used."""
        self._level = self._fill(now) - tokens
        self._at = now

    def wait_s(self, tokens: int, now: float) -> float:
        """Until `tokens` may be used: as many are there, or the bucket is full. 0: now."""
        return max(0.0, min(float(tokens), self._capacity) - self._fill(now)) / self._rate

    def is_full(self, now: float) -> bool:
        """Whether it is as new."""
        return self._fill(now) >= self._capacity

    def _fill(self, now: float) -> float:
        return min(self._capacity, self._level + (now - self._at) * self._rate)


class Tenant:
    """One caller's account."""

    def __init__(self, identity: Identity, now: float) -> None:
        self.identity = identity
        self.requests = 0
        limit = identity.tokens_per_minute
        self.bucket = None if limit is None else TokenBucket(limit, now)

    def is_idle(self, now: float) -> bool:
        """Whether forgetting it changes nothing."""
        return self.requests == 0 and (self.bucket is None or self.bucket.is_full(now))


class Tenants:
    """Accounts by name. Those that are as new are forgotten, so that there are about as many as active callers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def enter(self, identity: Identity, priority: int, place_s: float, places: int) -> Tenant:
        """Take `places` of the caller's. `place_s`: when one is expected to be free again, for the refusal.

        Raises PermissionDeniedError: it may not have the priority, or so many. Raises OverloadedError: a limit is
        reached.
        """
        if identity.max_priority is not None and priority > identity.max_priority:
            raise PermissionDeniedError(
                f"priority: {priority} is not allowed to {identity.name}; allowed: -100 to {identity.max_priority}"
            )
        tenant = self._account(identity)
        most = identity.max_requests
        if most is not None and places > max(most, 1):
            raise PermissionDeniedError(f"{places} choices are more than {identity.name} may have in flight: {most}")
        if most is not None and tenant.requests + places > most:
            raise OverloadedError(
                f"{identity.name} has {tenant.requests} requests in flight, at most {most}",
                retry_ms(place_s),
                "tenant_requests",
            )
        self._check_tokens(tenant, 1)
        tenant.requests += places
        return tenant

    def add_prompt(self, tenant: Tenant, tokens: int) -> None:
        """Charge a prompt. Raises OverloadedError: the caller has used its tokens up."""
        self._check_tokens(tenant, tokens)
        self.charge(tenant, tokens)

    def charge(self, tenant: Tenant, tokens: int) -> None:
        """Tokens were used."""
        if tenant.bucket is not None:
            tenant.bucket.take(tokens, self._clock())

    def leave(self, tenant: Tenant, places: int) -> None:
        """Give `places` back."""
        tenant.requests -= places
        if tenant.is_idle(self._clock()):
            del self._tenants[tenant.identity.name]

    def _account(self, identity: Identity) -> Tenant:
        tenant = self._tenants.get(identity.name)
        # Keys are read again when their file changes: with other limits the account starts anew.
        if tenant is None or (tenant.identity != identity and tenant.requests == 0):
            self._forget_idle()
            tenant = self._tenants[identity.name] = Tenant(identity, self._clock())
        return tenant

    def _forget_idle(self) -> None:
        now = self._clock()
        for name in [name for name, tenant in self._tenants.items() if tenant.is_idle(now)]:
            del self._tenants[name]

    def _check_tokens(self, tenant: Tenant, tokens: int) -> None:
        wait_s = 0.0 if tenant.bucket is None else tenant.bucket.wait_s(tokens, self._clock())
        if wait_s > 0:
            raise OverloadedError(
                f"{tenant.identity.name} has used its {tenant.identity.tokens_per_minute} tokens a minute",
                retry_ms(wait_s),
                "tenant_tokens",
            )


_MIN_RETRY_MS = 10
_MAX_RETRY_MS = 60_000


def retry_ms(seconds: float) -> int:
    """A delay to tell a refused client."""
    return min(_MAX_RETRY_MS, max(_MIN_RETRY_MS, int(seconds * 1000) + 1))
