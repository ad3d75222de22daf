"""Who makes a call, and how much of the service is theirs."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller, by the name of its API key. A limit that is None is not set for this caller.

    `max_requests`: in flight. `tokens_per_minute`: of prompts and completions. `max_priority`: of a request.
    """

    name: str
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    max_priority: int | None = None


# Everybody, where no keys are asked for.
ANONYMOUS = Identity("anonymous")

_current: ContextVar[Identity] = ContextVar("identity", default=ANONYMOUS)


def current() -> Identity:
    """The caller of the RPC that the running task handles."""
    return _current.get()


def assume(identity: Identity) -> None:
    """For the authenticating interceptor: the rest of this task is work for `identity`."""
    _current.set(identity)
