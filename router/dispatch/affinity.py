"""Which worker gets a request: the one that has probably seen its beginning, unless that one is busier than its share.

Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2017): a
worker that comes or goes moves only the prompts that were, or will be, its own.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

# Of the prompt's beginning, what decides: beyond it prompts that share a system prompt would be spread.
AFFINITY_PAGES = 8
# No worker gets more than this times its share of all requests.
LOAD_BOUND = 1.25


class Candidate(NamedTuple):
    """`places`: how many requests it runs at once; `open_requests`: how many it has."""

    name: str
    places: int
    open_requests: int


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


def prefix_key(prompt_ids: Sequence[int], page_size: int) -> bytes | None:
    """Names the first complete pages of a prompt; None: it has no complete page, so there is nothing to find again."""
    pages = min(len(prompt_ids) // page_size, AFFINITY_PAGES)
    return None if pages == 0 else hashlib.sha256(array("I", prompt_ids[: pages * page_size]).tobytes()).digest()


def choose(key: bytes | None, candidates: Sequence[AnyCandidate]) -> AnyCandidate:
    """One of at least one candidate. Without a key the least loaded for its size."""
    if key is None:
        return min(candidates, key=lambda candidate: (candidate.open_requests + 1) / max(1, candidate.places))
    everything = sum(candidate.open_requests for candidate in candidates) + 1
    places = sum(max(1, candidate.places) for candidate in candidates)
    ranked = sorted(candidates, key=lambda candidate: _score(key, candidate), reverse=True)
    for candidate in ranked:
        if candidate.open_requests < math.ceil(LOAD_BOUND * everything * max(1, candidate.places) / places):
            return candidate
    raise AssertionError("the bounds add up to more than all requests")


def _score(key: bytes, candidate: Candidate) -> float:
    """Weighted rendezvous: a worker wins in proportion to its places."""
    digest = hashlib.sha256(key + candidate.name.encode()).digest()
    uniform = (struct.unpack_from("<Q", digest)[0] + 0.5) / 2**64
    return -max(1, candidate.places) / math.log(uniform)
