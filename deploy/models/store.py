"""The cache directory: what is in it, when a model in it is complete, and how one is put there.

A model directory appears under its name by one rename, with its manifest inside: whatever interrupts a conversion
leaves only a directory whose name begins with a dot.
"""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glmserve.service.cache import cache_root

__all__ = ["MANIFEST", "cache_root", "is_complete", "locked", "publishing"]

MANIFEST = "glmserve-manifest.json"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock between processes; the second one waits and then finds the first one's work done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_complete(directory: Path, identity: dict[str, str]) -> bool:
    """Whether `directory` holds what a conversion of this identity wrote, every file at its recorded size."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest.get("identity") != identity:
        return False
    files: dict[str, int] = manifest["files"]
    return all(
        (directory / name).is_file() and (directory / name).stat().st_size == size for name, size in files.items()
    )


@contextmanager
def publishing(directory: Path, identity: dict[str, str]) -> Iterator[Path]:
    """Yield an empty directory to fill, then seal it with a manifest and make it `directory`; on an error remove it.

    The caller holds the model's lock, so what a killed predecessor left behind belongs to nobody.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in directory.parent.glob(f".{directory.name}.*/"):
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
        filled = Path(scratch) / "new"
        filled.mkdir()
        yield filled
        files = {path.name: path.stat().st_size for path in sorted(filled.iterdir())}
        (filled / MANIFEST).write_text(json.dumps({"identity": identity, "files": files}, indent=2) + "\n")
        if directory.exists():
            shutil.move(directory, Path(scratch) / "old")
        filled.rename(directory)
