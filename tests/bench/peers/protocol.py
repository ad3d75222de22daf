"""One engine in a process of its own, driven over its standard streams: a line of JSON each way.

The child first says {"load_s": seconds}. Then it answers
{"do": "decode", "batch": N, "steps": K} with {"seconds": of a step},
{"do": "prefill", "tokens": N} with {"seconds": of the prompt},
{"do": "memory"} with {"peak_mb": MB, "private_mb": MB}. It ends when its input does.
This module is also imported by children whose Python has none of this repository's dependencies: it needs the standard
library only.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PROMPT = 64
MAX_BATCH = 16
Answer = dict[str, float]


class PeerError(Exception):
    """A child said something else than what was asked for, or ended."""


class Peer:
    """The parent's end. What the child writes to its error stream goes to the file `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log
        self.load_s = self._answer()["load_s"]

    def ask(self, **request: object) -> Answer:
        """Raises PeerError: the child has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def close(self) -> int:
        """The child's exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()

    def _ended(self) -> PeerError:
        return PeerError(f"{self.name} ended with status {self.close()}; see {self._log}")

    def _answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return parse_answer(self.name, line)


def parse_answer(name: str, line: str) -> Answer:
    """The numbers of an answer by name. Raises PeerError: it is something else."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or not all(isinstance(value, int | float) for value in answer.values()):
        raise PeerError(f"{name} said {line.strip()!r}, expected one JSON object of numbers")
    return answer


def serve(load_s: float, actions: dict[str, Callable[..., float]]) -> None:
    """The child's end. `actions` return seconds."""
    _say({"load_s": load_s})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        action = request.pop("do")
        if action == "memory":
            _say({"peak_mb": memory_mb("VmHWM"), "private_mb": memory_mb("RssAnon")})
        else:
            _say({"seconds": actions[action](**request)})


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """The same random ids for every engine."""
    rng = random.Random(0)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


def memory_mb(key: str) -> float:
    """A size of this process in MB (10^6 bytes)."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise PeerError(f"/proc/self/status has no {key}")
    return int(found[1]) * 1024 / 1e6


def _say(answer: Answer) -> None:
    print(json.dumps(answer), flush=True)
