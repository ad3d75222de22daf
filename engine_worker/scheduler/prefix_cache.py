"""The index of published KV pages: a hash chain over complete pages, and the order in which unheld ones are evicted."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

ROOT = b""


def page_digest(parent: bytes, tokens: array[int]) -> bytes:
    """The name of a complete page: SHA-256 over its predecessor's name (ROOT for the first) and its own tokens.

    So equal names mean equal histories.
    """
    return hashlib.sha256(parent + tokens.tobytes()).digest()


class PrefixCache:
    """Published pages by digest. It knows nothing of references: `KvAllocator` parks a page when nobody holds it."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._parked: OrderedDict[int, None] = OrderedDict()

    def lookup(self, digest: bytes) -> int | None:
        """The page published under `digest`."""
        return self._page_of.get(digest)

    def insert(self, digest: bytes, page: int) -> None:
        """Publish `page`, which somebody holds, under a digest that is not yet taken."""
        self._page_of[digest] = page
        self._digest_of[page] = digest

    def park(self, page: int) -> None:
        """Nobody holds published `page` any more: it becomes the last to be evicted."""
        self._parked[page] = None

    def unpark(self, page: int) -> None:
        """Somebody holds published `page` again."""
        self._parked.pop(page, None)

    def evict(self) -> int:
        """Forget the page parked longest ago and return it. KeyError if none is parked."""
        page, _ = self._parked.popitem(last=False)
        del self._page_of[self._digest_of.pop(page)]
        return page

    @property
    def num_parked(self) -> int:
        """Published pages that nobody holds."""
        return len(self._parked)

    def parked_pages(self) -> list[int]:
        """Pages in order of eviction."""
        return list(self._parked)

    def __contains__(self, page: int) -> bool:
        return page in self._digest_of

    def __len__(self) -> int:
        return len(self._page_of)
