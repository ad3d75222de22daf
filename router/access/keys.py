"""API keys: how they are made, kept as hashes in a TOML file, and recognised.

A key is 256 random bits, so a plain SHA-256 of it tells nothing, and a slow hash would only serve who wants to burn our
CPU.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glmserve.service.identity import Identity
from glmserve.service.settings import SettingsError

_PREFIX = "glm_"
_KEY_BYTES = 32


def new_key() -> str:
    """A fresh key. It is shown to its owner and kept nowhere."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_hash(key: str) -> str:
    """What the keys file has of a key."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class KeyEntry(BaseModel):
    """One [[key]] of the file. A limit that is left out is not set for this key."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    hash: str = Field(pattern=r"^sha256:[0-9a-f]{64}$")
    max_requests: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_priority: int | None = Field(None, ge=-100, le=100)

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.max_requests, self.tokens_per_minute, self.max_priority)


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    key: tuple[KeyEntry, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Keys:
    """The keys that are in force."""

    entries: Sequence[KeyEntry]

    def identify(self, key: str) -> Identity | None:
        """Whose key it is. Compares with every entry, in a time that tells nothing about any of them."""
        presented = key_hash(key)
        found: Identity | None = None
        for entry in self.entries:
            if hmac.compare_digest(entry.hash, presented):
                found = entry.identity
        return found


def read_keys(path: Path) -> Keys:
    """Raises SettingsError naming the file and what is wrong in it."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    try:
        entries = _KeysFile.model_validate(values).key
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise SettingsError(f"{path}: {problems}") from None
    for field in ("name", "hash"):
        seen: set[str] = set()
        for index, entry in enumerate(entries):
            value = getattr(entry, field)
            if value in seen:
                raise SettingsError(f"{path}: key.{index}.{field}: {value!r} is in the file twice")
            seen.add(value)
    return Keys(entries)
