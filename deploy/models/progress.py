"""How long work reports itself, without knowing who shows it."""

from collections.abc import Callable

# (stage, done, total): what is being done, and how much of how much; total 0 means that the amount is unknown.
Progress = Callable[[str, int, int], None]


def silent(_stage: str, _done: int, _total: int) -> None:
    """For callers that show nothing."""
