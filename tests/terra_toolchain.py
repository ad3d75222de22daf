"""Terra, where it is there: what needs it is skipped elsewhere, with the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine_worker.driver.toolchain import Toolchain, find_toolchain
from engine_worker.errors import UnsupportedError


def _find() -> tuple[Toolchain | None, str]:
    try:
        return find_toolchain(), ""
    except UnsupportedError as error:
        return None, str(error)


TOOLCHAIN, MISSING = _find()
needs_terra = pytest.mark.skipif(TOOLCHAIN is None, reason=MISSING)


def toolchain() -> Toolchain:
    assert TOOLCHAIN is not None, MISSING
    return TOOLCHAIN


@contextmanager
def drivers_kept_in(directory: Path) -> Iterator[None]:
    """Drivers that are compiled in the block are not left in the user's cache."""
    before = os.environ.get("GLM_CACHE_DIR")
    os.environ["GLM_CACHE_DIR"] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ["GLM_CACHE_DIR"]
        else:
            os.environ["GLM_CACHE_DIR"] = before
