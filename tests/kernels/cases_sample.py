"""Sampling problems: a batch of requests, their logits and the counts of what they have seen."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.kernels import abi
from tests.kernels.harness import (
    Array,
    BoundSlots,
    Chunk,
    Device,
    F32Array,
    SlotState,
    Step,
    tensor,
)

VOCABS = [1, 7, 255, 256, 257, 8192, 8195, 49152, 151552]


def request(
    *,
    stop_ids: Sequence[int] = (),
    bias: Sequence[tuple[int, float]] = (),
    **fields: Any,
) -> abi.Sampling:
    """Neutral settings at temperature 1, with these changes."""
    values = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "num_logprobs": -1, "seed": 1, **fields}
    made = abi.Sampling(**values)
    made.num_stop_ids, made.num_bias = len(stop_ids), len(bias)
    for i, token in enumerate(stop_ids):
        made.stop_ids[i] = token
    for i, (token, value) in enumerate(bias):
        made.bias_ids[i], made.bias_values[i] = token, value
    return made


# Name -> settings that exercise one rule or a combination.
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.05},
    "coldest": {"temperature": 1e-6},
    "top_k_1": {"top_k": 1},
    "top_k_5": {"top_k": 5},
    "top_k_1000": {"top_k": 1000},
    "top_k_over_vocab": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.9},
    "top_p_half": {"top_p": 0.5},
    "top_p_tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "min_p_1": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 40, "top_p": 0.8},
    "all_three": {"top_k": 200, "top_p": 0.95, "min_p": 0.02, "temperature": 0.7},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.5},
    "rewards": {"repetition_penalty": 0.5, "frequency_penalty": -0.2, "presence_penalty": -1.5, "top_p": 0.95},
    "greedy_penalties": {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 2.0},
}


def mask_words(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """[ceil(vocab / 32)]; bits beyond the vocabulary are set."""
    bits = np.ones(-(-allowed.size // 32) * 32, bool)
    bits[: allowed.size] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


@dataclass
class Sampled:
    tokens: npt.NDArray[np.int32]
    logprobs: Array
    top_ids: Array
    top_logprobs: Array
    last_token: npt.NDArray[np.int32]
    counts: npt.NDArray[np.uint16]


@dataclass
class SampleProblem:
    """Sample i belongs to slot `slots[i]`, whose newest token is at `positions[i]`: the one drawn comes after it."""

    logits: F32Array
    requests: Sequence[abi.Sampling]
    positions: Sequence[int]
    counts: npt.NDArray[np.uint16] | None = None
    slots: Sequence[int] = field(default_factory=list)
    first: int = 0  # token of the first column
    allowed: Sequence[npt.NDArray[np.bool_] | None] = ()  # [vocab] of each sample; None: any token
    forced: Sequence[int] = ()  # -1: sampled

    def __post_init__(self) -> None:
        samples, vocab = self.logits.shape
        self.slots = self.slots or list(range(samples))
        self.allowed = self.allowed or [None] * samples
        self.forced = self.forced or [-1] * samples
        if self.counts is None:
            self.counts = np.zeros((max([*self.slots, 0]) + 1, vocab), np.uint16)

    def only(self, sample: int) -> "SampleProblem":
        picked = slice(sample, sample + 1)
        return SampleProblem(
            self.logits[picked],
            self.requests[picked],
            self.positions[picked],
            self.counts,
            self.slots[picked],
            allowed=self.allowed[picked],
            forced=self.forced[picked],
        )

    def columns(self, first: int, end: int) -> "SampleProblem":
        """The same with logits of the tokens [first, end) only."""
        return replace(self, logits=np.ascontiguousarray(self.logits[:, first:end]), first=first)

    def _bind_slots(self) -> BoundSlots:
        assert self.counts is not None
        sampling = [abi.Sampling() for _ in range(len(self.counts))]
        for slot, one in zip(self.slots, self.requests, strict=True):
            sampling[slot] = one
        vocab = self.counts.shape[1]
        return SlotState(np.zeros((len(self.counts), 1), np.int32), vocab, sampling, self.counts).bind()

    def run(self, device: Device) -> Sampled:
        """Every sample is the second of two rows of its sequence, so sample_rows differ from samples."""
        samples, vocab = self.logits.shape
        chunks = [Chunk(slot, p - 1, 2) for slot, p in zip(self.slots, self.positions, strict=True)]
        masks = [mask_words(allowed) for allowed in self.allowed if allowed is not None]
        places = itertools.count()
        step = Step(
            chunks,
            sample_rows=[2 * i + 1 for i in range(samples)],
            sample_slots=self.slots,
            sample_masks=[-1 if allowed is None else next(places) for allowed in self.allowed],
            forced_tokens=self.forced,
            masks=np.stack(masks) if masks else None,
        ).bind()
        slots, logits = self._bind_slots(), tensor(self.logits, vocab + 3)
        args = abi.SampleArgs(rows=samples, logits=logits.struct, first=self.first)
        args.step.contents, args.slots.contents = step.struct, slots.struct
        device.run(abi.Op.SAMPLE, args)
        logits.read()
        return Sampled(
            step.out_token_ids.read(),
            step.out_logprobs.read(),
            step.out_top_ids.read(),
            step.out_top_logprobs.read(),
            slots.last_token.read(),
            slots.counts.read(),
        )


Logits = Callable[[np.random.Generator, int, int], F32Array]


def flat(rng: np.random.Generator, samples: int, vocab: int) -> F32Array:
    return rng.standard_normal((samples, vocab)).astype(np.float32)


def peaked(rng: np.random.Generator, samples: int, vocab: int) -> F32Array:
    """A few likely tokens over a long tail, as language models give."""
    return (2 * rng.standard_normal((samples, vocab)) + 3 * rng.gumbel(size=(samples, vocab))).astype(np.float32)


def coarse(rng: np.random.Generator, samples: int, vocab: int) -> F32Array:
    """Many exact ties, also between 0 and -0."""
    return (np.round(rng.standard_normal((samples, vocab)) * 2) / 2).astype(np.float32)


def counted(rng: np.random.Generator, slots: int, vocab: int) -> npt.NDArray[np.uint16]:
    """About a tenth of the tokens seen in the prompt, another tenth sampled, a few as often as can be counted."""
    kind = rng.random((slots, vocab))
    counts = np.where(kind < 0.1, 0x8000, 0) + np.where(kind > 0.9, rng.integers(1, 4, (slots, vocab)), 0)
    counts = counts + np.where((kind > 0.05) & (kind < 0.06), 2, 0)
    return np.where(kind > 0.999, 0x7FFF, counts).astype(np.uint16)
