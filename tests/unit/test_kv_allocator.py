"""Pages: one state each, one owner for every free."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_worker.errors import InternalError
from engine_worker.scheduler.kv_allocator import KvAllocator

NUM_PAGES = 6


@pytest.mark.parametrize("num_pages", [1, 2, 7])
def test_hands_out_every_page_once(num_pages: int) -> None:
    allocator = KvAllocator(num_pages)
    assert sorted(allocator.allocate(num_pages) or []) == list(range(num_pages))
    assert allocator.allocate(1) is None
    assert allocator.allocate(0) == []


def test_all_or_nothing() -> None:
    allocator = KvAllocator(3)
    allocator.allocate(2)
    assert allocator.allocate(2) is None
    assert allocator.num_free == 1


def test_a_page_freed_twice_is_an_error() -> None:
    """Fault 14: the finish path and the prefix cache both free a page."""
    allocator = KvAllocator(2)
    pages = allocator.allocate(1) or []
    allocator.publish(pages[0], b"a")
    allocator.release(pages)
    with pytest.raises(InternalError, match=r"KV page 0 is freed twice"):
        allocator.release(pages)
    allocator.check([])


def test_an_evicted_page_has_no_name() -> None:
    allocator = KvAllocator(1)
    page = (allocator.allocate(1) or [])[0]
    allocator.publish(page, b"a")
    allocator.release([page])
    assert allocator.lookup(b"a") == page
    assert allocator.allocate(1) == [page]
    assert allocator.lookup(b"a") is None
    with pytest.raises(InternalError, match="never published"):
        allocator.hold(page)


def test_free_pages_go_before_cached_ones() -> None:
    allocator = KvAllocator(2)
    first, second = allocator.allocate(2) or []
    allocator.publish(first, b"a")
    allocator.release([second, first])
    assert allocator.allocate(1) == [second]
    assert allocator.lookup(b"a") == first


def test_leaves_are_evicted_first_and_old_ones_before_new() -> None:
    allocator = KvAllocator(4)
    old = allocator.allocate(2) or []
    new = allocator.allocate(2) or []
    for name, page in zip((b"old0", b"old1", b"new0", b"new1"), (*old, *new), strict=True):
        allocator.publish(page, name)
    allocator.release(reversed(old))
    allocator.release(reversed(new))
    assert [page for _ in range(4) for page in allocator.allocate(1) or []] == [old[1], old[0], new[1], new[0]]


def test_a_name_that_is_taken_goes_to_its_first_bearer() -> None:
    allocator = KvAllocator(2)
    first, second = allocator.allocate(2) or []
    assert allocator.publish(first, b"a") == first
    assert allocator.publish(second, b"a") == first
    assert allocator.references(first) == 2
    allocator.release([second, first, first])
    allocator.check([])
    assert (allocator.num_free, allocator.num_cached) == (1, 1)


def test_a_page_that_nobody_holds_cannot_be_published() -> None:
    allocator = KvAllocator(1)
    with pytest.raises(InternalError, match="references 0"):
        allocator.publish(0, b"a")


@pytest.mark.parametrize(("held", "text"), [([], "has 1 references, its owners know of 0"), ([0, 0], "know of 2")])
def test_check_names_the_page_whose_references_are_wrong(held: list[int], text: str) -> None:
    allocator = KvAllocator(2)
    allocator.allocate(1)
    with pytest.raises(InternalError, match=text):
        allocator.check(held)


class AllocatorMachine(RuleBasedStateMachine):
    """Holders come and go; each holds a chain of pages, the published ones first."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = KvAllocator(NUM_PAGES)
        self.holders: list[tuple[str, list[int], int]] = []

    @rule(name=st.sampled_from("ab"), length=st.integers(1, 4))
    def begin(self, name: str, length: int) -> None:
        matched: list[int] = []
        for index in range(length - 1):
            page = self.allocator.lookup(self._digest(name, index))
            if page is None:
                break
            matched.append(page)
        for page in matched:
            self.allocator.hold(page)
        fresh = self.allocator.allocate(length - len(matched))
        if fresh is None:
            self.allocator.release(reversed(matched))
        else:
            self.holders.append((name, matched + fresh, len(matched)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.holders) - 1))
        name, pages, published = self.holders[number]
        if published < len(pages):
            own = pages[published]
            pages[published] = self.allocator.publish(own, self._digest(name, published))
            if pages[published] != own:
                self.allocator.release([own])
            self.holders[number] = (name, pages, published + 1)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, pages, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.release(reversed(pages))

    @invariant()
    def books_balance(self) -> None:
        self.allocator.check(page for _, pages, _ in self.holders for page in pages)
        held = {page for _, pages, _ in self.holders for page in pages}
        assert self.allocator.num_free + self.allocator.num_cached + len(held) == NUM_PAGES
        assert self.allocator.num_available == NUM_PAGES - len(held)

    @invariant()
    def chains_have_no_gaps(self) -> None:
        """Leaves go first: where a page has a name, all before it have theirs."""
        for name in "ab":
            known = [self.allocator.lookup(self._digest(name, index)) is not None for index in range(4)]
            assert known == sorted(known, reverse=True)

    @staticmethod
    def _digest(name: str, index: int) -> bytes:
        return f"{name}{index}".encode()


TestAllocator = AllocatorMachine.TestCase
