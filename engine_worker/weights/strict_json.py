"""JSON as a checkpoint's files hold it: one object, each key once, no NaN or infinity."""

from __future__ import annotations

import json
from pathlib import Path

from engine_worker.errors import CheckpointError


def read_json_object(path: Path) -> tuple[dict[str, object], bytes]:
    """The object in `path` and the file's bytes. Raises CheckpointError naming the file and what is wrong in it."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return parse_json_object(data, str(path)), data


def parse_json_object(data: bytes, where: str) -> dict[str, object]:
    """Parse UTF-8 `data`; `where` begins every message. Raises CheckpointError."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: byte {error.start} is not valid UTF-8") from error
    except RecursionError as error:
        raise CheckpointError(f"{where}: JSON is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {duplicate!r} appears twice")
    return result


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
