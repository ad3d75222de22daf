"""What to send and when: Poisson arrivals, a fixed number in flight, or a recorded trace."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import DeployError


class TraceError(DeployError):
    """A trace cannot be replayed. The text names file, line and field."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds from the start, and its lengths in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def poisson(rate: float, seconds: float, prompt_tokens: int, output_tokens: int, seed: int) -> list[Arrival]:
    """Arrivals of a Poisson process of `rate` a second, in order. The same seed gives the same ones."""
    rng = random.Random(seed)  # noqa: S311 - a load, no secret
    arrivals = []
    now = rng.expovariate(rate)
    while now < seconds:
        arrivals.append(Arrival(now, prompt_tokens, output_tokens))
        now += rng.expovariate(rate)
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """One JSON object a line: arrival_s, prompt_tokens, output_tokens. Sorted by arrival. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from None
    arrivals = sorted(_parse(path, lines), key=lambda arrival: arrival.arrival_s)
    if not arrivals:
        raise TraceError(f"{path}: empty; a trace has one JSON object a line")
    return arrivals


def _parse(path: Path, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        if not isinstance(record, dict):
            raise TraceError(f"{where}: not a JSON object")
        yield Arrival(
            _number(where, record, "arrival_s", 0, (int, float)),
            int(_number(where, record, "prompt_tokens", 1, (int,))),
            int(_number(where, record, "output_tokens", 1, (int,))),
        )


def _number(where: str, record: dict[str, Any], name: str, low: int, types: tuple[type, ...]) -> float:
    value: Any = record.get(name)
    # By exact type, because bool is a subclass of int. NaN fails the comparison.
    if type(value) in types and low <= value < float("inf"):
        return float(value)
    kind = "an integer" if types == (int,) else "a number"
    raise TraceError(f"{where}: {name} is {value!r}; allowed: {kind} of at least {low}")
