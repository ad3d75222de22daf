"""An engine without a model, with the contract of `runtime.abi.Engine`: each token is a function of the whole history.

As in a model, what a row leaves in its page depends on what all rows before it left, which it finds through the page
table: a wrong or overwritten page, a row that never ran or a stale token changes every later token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from engine_worker.runtime.records import Int32Array, MaskArray, Sampling, StepBatch, StepResult

VOCAB = 50
MAX_LOGPROBS = 20


_MASK = 2**31 - 1


def mix(state: int, token: int) -> int:
    return hash((state, token)) & _MASK


def attend(values: Sequence[int]) -> int:
    """What a row sees of the values of positions 0, 1, ... before it."""
    return sum((index + 1) * value for index, value in enumerate(values)) & _MASK


def choose(
    state: int,
    seen: int,
    sampling: Sampling,
    num_sampled: int,
    poison: frozenset[int],
    mask: MaskArray | None = None,
) -> int:
    """The next token of a history; `poison`: seeds whose third token has no finite logit; `mask`: those it may be."""
    if sampling.seed in poison and num_sampled == 2:
        return -1
    token = mix(state ^ seen, sampling.seed) % VOCAB
    if mask is not None:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB])
        return int(allowed[token % len(allowed)]) if len(allowed) else -1
    while num_sampled < sampling.min_tokens and token in sampling.stop_ids:
        token = (token + 1) % VOCAB
    return token


def has_penalties(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def undisturbed(
    prompt: Sequence[int], sampling: Sampling, max_tokens: int, poison: frozenset[int] = frozenset()
) -> list[int]:
    """What the engine says of a prompt that has it all to itself, up to and with a stop id."""
    values: list[int] = []
    for token in prompt:
        values.append(mix(attend(values), token))
    out: list[int] = []
    while len(out) < max_tokens:
        seen = sum(prompt) + sum(out) if has_penalties(sampling) else 0
        token = choose(values[-1], seen, sampling, len(out), poison)
        if token < 0:
            break
        out.append(token)
        if token in sampling.stop_ids:
            break
        values.append(mix(attend(values), token))
    return out


@dataclass
class _Slot:
    sampling: Sampling
    seen: int
    last_token: int = -1
    pages: dict[int, int] = field(default_factory=dict)


class ScriptedEngine:
    """Work is done late: a step runs when it is collected."""

    def __init__(self, num_pages: int, page_size: int, poison: Iterable[int] = ()) -> None:
        self.page_size = page_size
        self.poison = frozenset(poison)
        self.pages = np.full((num_pages, page_size), -1, np.int64)
        self.slots: dict[int, _Slot] = {}
        self.steps: list[StepBatch] = []
        self.before_collect: Callable[[int], None] = lambda step: None
        self.calls: list[str] = []
        self._collected = 0
        self._held: deque[StepBatch] = deque()
        self._masks: deque[MaskArray] = deque()
        self._work: deque[Callable[[], StepResult | None]] = deque()

    def bind_slot(self, slot: int, sampling: Sampling, prompt: Int32Array, sampled: Int32Array) -> None:
        seen = int(prompt.sum() + sampled.sum())
        self.calls.append(f"bind {slot}")

        def bind() -> None:
            assert slot not in self.slots, f"slot {slot} is bound twice"
            self.slots[slot] = _Slot(sampling, seen)

        self._work.append(bind)

    def release_slot(self, slot: int) -> None:
        self.calls.append(f"release {slot}")

        def release() -> None:
            self.slots.pop(slot, None)

        self._work.append(release)

    def submit(self, batch: StepBatch) -> None:
        assert self.uncollected < 2, "more than two steps are in flight"
        copy = deepcopy(batch)
        self.calls.append("submit")
        self.steps.append(copy)
        if copy.num_masks:
            self._held.append(copy)
        self._work.append(lambda: self._run(copy))

    def set_masks(self, masks: MaskArray) -> None:
        assert self._held, "no step is held"
        assert masks.shape == (self._held.popleft().num_masks, -(-VOCAB // 32))
        self.calls.append("masks")
        self._masks.append(masks.copy())

    @property
    def uncollected(self) -> int:
        return len(self.steps) - self._collected

    def collect(self) -> StepResult:
        assert self.uncollected, "no step to collect"
        self.before_collect(self._collected)
        self._collected += 1
        while True:
            result = self._work.popleft()()
            if result is not None:
                return result

    def _run(self, batch: StepBatch) -> StepResult:
        for slot, index, page in batch.page_updates.tolist():
            self.slots[slot].pages[index] = page
        assert len(set(batch.seq_slots.tolist())) == len(batch.seq_slots), "a slot has two sequences in one step"
        sample_rows = batch.sample_rows.tolist()
        assert sample_rows == sorted(set(sample_rows))
        sampled: list[int] = []
        masks = self._masks.popleft() if batch.num_masks else None
        for number, slot in enumerate(batch.seq_slots.tolist()):
            for row in range(int(batch.seq_starts[number]), int(batch.seq_starts[number + 1])):
                state = self._compute(slot, int(batch.token_ids[row]), int(batch.positions[row]))
                if row in sample_rows:
                    forced = -1 if batch.forced_tokens is None else int(batch.forced_tokens[len(sampled)])
                    if forced >= 0:
                        sampled.append(forced)
                        continue
                    place = -1 if batch.sample_masks is None else int(batch.sample_masks[len(sampled)])
                    mask = None if masks is None or place < 0 else masks[place]
                    sampled.append(self._sample(slot, state, int(batch.positions[row]), mask))
        assert len(sampled) == len(sample_rows)
        return step_result(sampled)

    def _compute(self, slot: int, token: int, position: int) -> int:
        state = self.slots[slot]
        table = [state.pages[index] for index in range(position // self.page_size + 1)]
        before = self.pages[table].ravel()[:position].tolist()
        value = mix(attend(before), state.last_token if token == -1 else token)
        self.pages[table[-1], position % self.page_size] = value
        return value

    def _sample(self, slot: int, value: int, position: int, mask: MaskArray | None) -> int:
        state = self.slots[slot]
        num_sampled = position + 1 - state.sampling.prompt_len
        token = choose(value, state.seen, state.sampling, num_sampled, self.poison, mask)
        if token >= 0:
            state.last_token = token
            if has_penalties(state.sampling):
                state.seen += token
        return token


def step_result(token_ids: Sequence[int]) -> StepResult:
    """Log-probabilities that tell where they come from: -token, and -token - 1, - 2, ... for the alternatives."""
    ids = np.array(token_ids, np.int32)
    ranks = np.arange(MAX_LOGPROBS, dtype=np.int32)
    top = (ids[:, None] + ranks[None, :]) % VOCAB
    return StepResult(
        token_ids=ids,
        logprobs=-ids.astype(np.float32),
        top_ids=top.astype(np.int32),
        top_logprobs=-(ids[:, None] + ranks[None, :]).astype(np.float32),
        device_ns=1000,
    )
