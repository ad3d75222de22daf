"""A request as the scheduler sees it, and what it says about one."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine_worker.runtime.records import Sampling
from engine_worker.scheduler.prefix_cache import ROOT, page_digest

if TYPE_CHECKING:  # a library that a bare machine with a GPU may lack
    from engine_worker.constraints.matcher import RequestConstraint

RequestKey = tuple[int, int]


class State(enum.Enum):
    """WAITING -> RUNNING -> ENDED, with RUNNING -> PREEMPTED -> WAITING on the way; any may end."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    # Lost its place; its steps in flight still bring tokens, its pages are freed after them.
    PREEMPTED = enum.auto()
    ENDED = enum.auto()


class Reason(enum.Enum):
    """Why a request ended; the names of glmserve.engine.v1.FinishReason."""

    STOP = enum.auto()
    LENGTH = enum.auto()
    ABORTED = enum.auto()
    TIMEOUT = enum.auto()
    UNAVAILABLE = enum.auto()
    NUMERICAL_ERROR = enum.auto()
    CONSTRAINT_ERROR = enum.auto()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts, and seconds from receipt; a time that never came is the total."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    preemptions: int
    queue_s: float
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The one and only end of a request."""

    key: RequestKey
    reason: Reason
    stop_token_id: int | None
    usage: Usage
    seed: int


class ScoreOutput(NamedTuple):
    """The next tokens of a prompt have log-probabilities: `num_samples` of the step's result, from `sample` on."""

    request: Request
    sample: int
    num_samples: int


class TokenOutput(NamedTuple):
    """A token that belongs to the request's output; `sample` is its index in the step's result."""

    request: Request
    token_id: int
    sample: int


@dataclass(slots=True)
class Outputs:
    """What one call of the scheduler brought to light."""

    scores: list[ScoreOutput] = field(default_factory=list)
    tokens: list[TokenOutput] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` are the prompt, then what was generated before and here, as far as it is known.

    Positions below `scheduled` are in submitted steps, those below `computed` in collected ones; `pending` tokens have
    been sampled by submitted steps and are not known yet. Of the positions below `scored`, the log-probability of the
    prompt's next token is computed by submitted steps, if `num_prompt_logprobs` is not negative.
    """

    key: RequestKey
    tokens: array[int]
    prompt_len: int
    max_tokens: int
    stop_ids: frozenset[int]
    sampling: Sampling
    priority: int = 0
    arrival: float = 0.0
    age_s: float = 0.0  # on arrival: it was on other workers before
    deadline: float | None = None
    trace_id: str = ""
    constraint: RequestConstraint | None = None
    num_prompt_logprobs: int = -1

    state: State = State.WAITING
    rank: tuple[float, int] = (0.0, 0)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)  # indices in `pages` that the engine has not been told
    published: int = 0
    scheduled: int = 0
    computed: int = 0
    scored: int = 0
    pending: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    started: float | None = None
    first_token: float | None = None
    digests: list[bytes] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of the sequence, those not yet known included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Rows to compute before the next token can be sampled; 0 when the last token is already on its way."""
        length = len(self.tokens) + self.pending
        return 0 if length >= self.prompt_len + self.max_tokens else length - self.scheduled

    @property
    def is_unscored(self) -> bool:
        """Log-probabilities of the prompt are asked for and not yet all in steps."""
        return self.num_prompt_logprobs >= 0 and self.scored < self.prompt_len - 1

    @property
    def max_length(self) -> int:
        """Tokens of the sequence at its longest."""
        return self.prompt_len + self.max_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    def digest(self, index: int, page_size: int) -> bytes:
        """Name of complete page `index`; each is computed once."""
        digests = self.digests
        while len(digests) <= index:
            start = len(digests) * page_size
            digests.append(page_digest(digests[-1] if digests else ROOT, self.tokens[start : start + page_size]))
        return digests[index]

    def finish(self, reason: Reason, now: float) -> Finish:
        """The record of an end at `now`."""
        total = now - self.arrival
        usage = Usage(
            prompt_tokens=self.prompt_len,
            cached_prompt_tokens=self.cached_prompt_tokens,
            completion_tokens=self.completion_tokens,
            preemptions=self.preemptions,
            queue_s=total if self.started is None else self.started - self.arrival,
            first_token_s=total if self.first_token is None else self.first_token - self.arrival,
            total_s=total,
        )
        stop_token_id = self.tokens[-1] if reason is Reason.STOP else None
        return Finish(self.key, reason, stop_token_id, usage, self.sampling.seed)


# (slot, index, page): from this step on, `page` holds positions index * page_size ... of the sequence in `slot`.
PageUpdate = tuple[int, int, int]


class Chunk(NamedTuple):
    """Positions `start` ... `start + rows - 1` of a request; one whose token is not yet known stands alone.

    `scores`: how many bring the log-probability of the prompt's next token: the last that have one. `samples`: the last
    row brings the next token.
    """

    request: Request
    start: int
    rows: int
    samples: bool
    scores: int = 0

    @property
    def scored_rows(self) -> range:
        """Indices in the chunk."""
        end = min(self.rows, self.request.prompt_len - 1 - self.start)
        return range(end - self.scores, end)


@dataclass(slots=True)
class StepPlan:
    """One step, in the order in which the engine has to hear it: released slots, bound slots, pages, rows."""

    number: int
    released_slots: Sequence[int]
    bound: list[Request] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Rows whose logits are needed."""
        return sum(chunk.samples + chunk.scores for chunk in self.chunks)

    @property
    def constrained(self) -> list[Request]:
        """Of the chunks that sample under a constraint, in their order: each needs a mask."""
        return [chunk.request for chunk in self.chunks if chunk.samples and chunk.request.constraint is not None]

    @property
    def decode(self) -> bool:
        """Whether every row is of a generated token and brings the next.

        A prompt's last row is none, even alone: its numbers may not depend on how the prompt was cut or on its company.
        """
        return all(
            chunk.rows == 1 and chunk.samples and chunk.start >= chunk.request.prompt_len for chunk in self.chunks
        )
