"""Values made from files that may be replaced while the process runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from glmserve.service.settings import SettingsError

log = structlog.get_logger()

T = TypeVar("T")


class Reloaded(Generic[T]):
    """What `load` makes of `paths`, made again once one of them has changed.

    While they cannot be used the last good value stays, and the log says why. Any thread may ask.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], T]) -> None:
        """`load` raises SettingsError if the files cannot be used, and so does this."""
        self._paths = tuple(paths)
        self._load = load
        self._lock = threading.Lock()
        self._stamp = self._take_stamp()
        self._value = load()

    def current(self) -> T:
        """The value as of now."""
        with self._lock:
            stamp = self._take_stamp()
            if stamp != self._stamp:
                self._stamp = stamp
                self._renew()
            return self._value

    def _renew(self) -> None:
        names = [str(path) for path in self._paths]
        try:
            self._value = self._load()
        except SettingsError as error:
            log.error("files_not_reloaded", files=names, reason=str(error))
        else:
            log.info("files_reloaded", files=names)

    def _take_stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size
