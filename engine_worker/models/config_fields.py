"""Typed access to a config file's keys; every complaint names the file, the key, the value and what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from engine_worker.errors import CheckpointError, UnsupportedError

_REQUIRED: Final = object()


class ConfigFields:
    """The keys of one JSON object in `path`; `prefix` is the way to it."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: object = _REQUIRED) -> object:
        """The raw value. Raises CheckpointError if the key is missing and no default is given."""
        value = self._values.get(key, default)
        if value is _REQUIRED:
            raise CheckpointError(f"{self.path}: key {self.prefix}{key} is missing")
        return value

    def spelling(self, *spellings: str) -> str:
        """Which of the spellings of one key is used: exactly one, or several that agree."""
        present = [key for key in spellings if key in self]
        if not present:
            raise CheckpointError(
                f"{self.path}: key {self.prefix}{spellings[0]} (or {', '.join(spellings[1:])}) is missing"
            )
        if any(self._values[key] != self._values[present[0]] for key in present):
            values = ", ".join(f"{key} = {self._values[key]!r}" for key in present)
            raise CheckpointError(f"{self.path}: the spellings of {self.prefix}{spellings[0]} disagree: {values}")
        return present[0]

    def integer(self, key: str, least: int, most: int) -> int:
        value = self.get(key)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(key, value, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        """A finite number in [least, most]."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            raise self._wrong(key, value, f"a number from {least} to {most}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def choice(self, key: str, supported: Sequence[str]) -> str:
        """One of `supported`; any other value is one that this engine does not implement."""
        value = self.get(key)
        if value not in supported:
            raise UnsupportedError(
                f"{self.path}: {self.prefix}{key} {value!r} is not supported; supported: {', '.join(supported)}"
            )
        return str(value)

    def section(self, key: str) -> ConfigFields:
        """The object under `key`."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ConfigFields(self.path, value, f"{self.prefix}{key}.")

    def sections(self, key: str) -> list[ConfigFields]:
        """The objects in the object under `key`."""
        outer = self.section(key)
        return [outer.section(name) for name in outer._values]

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.prefix}{key}: {value!r}, expected {expected}")
