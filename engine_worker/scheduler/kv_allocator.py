"""Who owns which KV page.

    page ids  0 ............................................................ num_pages - 1
              | free            | held                          | cached              |
              | in `_free`      | references > 0                | published, unheld   |
                    |   allocate -> ^   |  ^ hold                        |
                    |                   |  +-----------------------------+
                    +---- release <-----+------ release, if published --> |
                    +<----------------------------- allocate, by eviction-+

Every page is in exactly one of the three states. A held page may be published too: then `hold` shares it. Pages of one
sequence are released last page first, and who holds a published page holds the pages before it; so a page is always
parked before its predecessors, and eviction in parking order takes leaves first.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine_worker.errors import InternalError
from engine_worker.scheduler.prefix_cache import PrefixCache


class KvAllocator:
    """All KV pages of the engine; the only place where a page changes state."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages
        self._cache = PrefixCache()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Published pages that nobody holds; they count as available."""
        return self._cache.num_parked

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + self._cache.num_parked

    def references(self, page: int) -> int:
        """How many hold `page`."""
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, all or none; evicts cached pages when the free ones run out."""
        if count > self.num_available:
            return None
        pages = [self._free.pop() if self._free else self._cache.evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def lookup(self, digest: bytes) -> int | None:
        """The page published under `digest`, held or cached. `allocate` may evict it unless it is held first."""
        return self._cache.lookup(digest)

    def hold(self, page: int) -> None:
        """Add a reference to a published page."""
        if page not in self._cache:
            raise InternalError(f"KV page {page} is shared but was never published")
        self._references[page] += 1
        self._cache.unpark(page)

    def publish(self, page: int, digest: bytes) -> int:
        """Name a held page whose K and V are complete and computed.

        Returns the page that bears the name: `page`, or the one published before it, which then has got a reference for
        the caller.
        """
        if self._references[page] < 1 or page in self._cache:
            raise InternalError(f"KV page {page} cannot be published: references {self._references[page]}")
        known = self._cache.lookup(digest)
        if known is None:
            self._cache.insert(digest, page)
            return page
        self.hold(known)
        return known

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page: give a sequence's pages last page first."""
        for page in pages:
            if self._references[page] < 1:
                raise InternalError(f"KV page {page} is freed twice")
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._cache:
                    self._cache.park(page)
                else:
                    self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """`held`: every reference that the owners know of. Raises InternalError if the books do not balance."""
        expected = [0] * self.num_pages
        for page in held:
            expected[page] += 1
        if expected != self._references:
            page = next(p for p in range(self.num_pages) if expected[p] != self._references[p])
            raise InternalError(
                f"KV page {page} has {self._references[page]} references, its owners know of {expected[page]}"
            )
        parked = self._cache.parked_pages()
        num_held = sum(1 for count in expected if count)
        total = self.num_free + len(parked) + num_held
        states = {*self._free, *parked, *(page for page, count in enumerate(expected) if count)}
        if total != self.num_pages or len(states) != self.num_pages:
            raise InternalError(
                f"KV pages do not add up: free {self.num_free} + cached {len(parked)} + held {num_held}, "
                f"total {self.num_pages}"
            )
