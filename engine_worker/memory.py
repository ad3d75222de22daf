"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

from engine_worker.errors import UnsupportedError


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """The kernel's estimate (MemAvailable), or what the cgroup leaves if that is less. File cache counts as available.

    Raises UnsupportedError where /proc does not say.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration) as error:
        raise UnsupportedError(
            f"{proc / 'meminfo'} does not tell the available memory ({error}): set kv_memory_mb"
        ) from None
    left = _cgroup_left(cgroup)
    return available if left is None else min(available, left)


def _cgroup_left(cgroup: Path) -> int | None:
    """None without a cgroup v2 limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
