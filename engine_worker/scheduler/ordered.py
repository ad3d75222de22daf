"""A list that stays sorted, with removal from the middle: for at most a few thousand entries."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ordered(Generic[T]):
    """Items in ascending order of `key`, which must be unique and must not change while an item is in here."""

    def __init__(self, key: Callable[[T], Any]) -> None:
        self._key = key
        self._items: list[T] = []

    def add(self, item: T) -> None:
        insort(self._items, item, key=self._key)

    def remove(self, item: T) -> None:
        """ValueError if it is not in here."""
        index = bisect_left(self._items, self._key(item), key=self._key)
        if index == len(self._items) or self._items[index] is not item:
            raise ValueError(f"{item!r} is not in the list")
        del self._items[index]

    @property
    def first(self) -> T:
        """IndexError if empty."""
        return self._items[0]

    @property
    def last(self) -> T:
        """IndexError if empty."""
        return self._items[-1]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
