"""The directory of what can be made again: downloads, converted models, compiled drivers."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$GLM_CACHE_DIR`, else `~/.cache/glmserve`."""
    configured = os.environ.get("GLM_CACHE_DIR")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "glmserve"
