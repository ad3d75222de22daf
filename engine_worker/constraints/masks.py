"""The masks of a step: which tokens each of its constrained requests may sample."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher

from engine_worker.runtime.records import MaskArray
from engine_worker.scheduler.request import Request, State

_MAX_THREADS = 16


class Broken(NamedTuple):
    """A constraint that cannot be followed further: its limits are exceeded."""

    request: Request
    error: str


class MaskFiller:
    """Used from the engine's thread; the interpreter lock is free while masks are computed."""

    def __init__(self, max_masks: int, vocab_size: int) -> None:
        self._masks = np.zeros((max_masks, -(-vocab_size // 32)), np.uint32)

    @cached_property
    def _executor(self) -> LLExecutor:
        """The CPU kernels need the cores too."""
        return LLExecutor(max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // 2)))

    def fill(self, requests: Sequence[Request]) -> tuple[MaskArray, list[Broken]]:
        """A mask for each, valid until the next call. All tokens of the requests that are not over must be known."""
        masks = self._masks[: len(requests)]
        ruled = []
        broken = []
        for index, request in enumerate(requests):
            constraint = request.constraint
            masks[index] = 0xFFFFFFFF
            if constraint is None or request.state is State.ENDED:
                continue  # its token will be dropped
            if error := constraint.advance(request.tokens[request.prompt_len :]):
                broken.append(Broken(request, error))
            elif constraint.begun:
                ruled.append((index, request, constraint))
        self._compute([(constraint.matcher, index) for index, _, constraint in ruled], masks)
        for index, request, constraint in ruled:
            if error := constraint.error:
                masks[index] = 0xFFFFFFFF
                broken.append(Broken(request, error))
        for index, request in enumerate(requests):
            if request.constraint is not None and request.state is not State.ENDED:
                request.constraint.hold_end(masks[index])
        return masks, broken

    def _compute(self, matchers: list[tuple[LLMatcher, int]], masks: MaskArray) -> None:
        if len(matchers) == 1:
            [(matcher, index)] = matchers
            matcher.unsafe_compute_mask_ptr(masks[index].ctypes.data, masks[index].nbytes)
        elif matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks[0].nbytes, len(masks))
