"""Stop strings over every cut of the text: nothing leaks, nothing is held longer than needed (fault 17)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings

# A small alphabet makes overlaps and repeated prefixes likely.
texts = st.text(alphabet="ab<", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab<", min_size=1, max_size=5), max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    machine = StopStrings(stops)
    text = "".join(machine.push(piece) for piece in pieces) + machine.finish()
    return text, machine.matched


def first_match(stops: list[str], text: str) -> tuple[str, str | None]:
    """By definition: the shortest prefix that ends with a stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def longest_open_suffix(stops: list[str], text: str) -> int:
    return max(
        (size for stop in stops for size in range(1, len(stop)) if size <= len(text) and text.endswith(stop[:size])),
        default=0,
    )


@given(stop_lists, texts, st.lists(st.integers(0, 24), max_size=6))
def test_equals_the_definition_for_every_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(borders)]
    assert run(stops, pieces) == first_match(stops, text)


@given(stop_lists, texts)
def test_holds_back_only_what_may_still_become_a_stop_string(stops: list[str], text: str) -> None:
    machine = StopStrings(stops)
    released = ""
    for end, character in enumerate(text, 1):
        released += machine.push(character)
        if machine.matched is not None:
            return
        assert released == text[: end - longest_open_suffix(stops, text[:end])]


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        (["</s>"], "a</s>b", "a", "</s>"),
        (["</s>"], "a</s", "a</s", None),
        (["aab"], "aaab", "a", "aab"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["bc", "abc"], "xabc", "x", "abc"),
        (["你好"], "说你好吗", "说", "你好"),
        (["a"], "a", "", "a"),
        ([], "a", "a", None),
        (["x", "x"], "ax", "a", "x"),
    ],
)
def test_cases(stops: list[str], text: str, expected: str, matched: str | None) -> None:
    for pieces in ([text], list(text)):
        assert run(stops, pieces) == (expected, matched)


def test_nothing_is_released_after_a_match() -> None:
    machine = StopStrings(["b"])
    assert machine.push("ab") == "a"
    assert machine.push("c") == ""
    assert machine.finish() == ""
