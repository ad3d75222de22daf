"""What this machine can do at best, measured by machine.cpp; and memory and CPU time of processes, from /proc."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("machine.cpp")
BUILD = Path(__file__).parents[2] / "build" / "bench"


@dataclass(frozen=True)
class Machine:
    """Ceilings with all threads: reading from memory, and f32 multiply-adds (two FLOPs each)."""

    threads: int
    read_bandwidth_gb_s: float
    fma_gflops: float


def measure_machine() -> Machine:
    """Best of three runs; compiled for the very processor it runs on."""
    BUILD.mkdir(parents=True, exist_ok=True)
    program = BUILD / "machine"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++20", "-O3", "-march=native", "-pthread"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(program)], check=True)
    threads = len(os.sched_getaffinity(0))
    runs = [json.loads(subprocess.check_output([str(program), str(threads)])) for _ in range(3)]
    return Machine(threads, max(run["read_bandwidth_gb_s"] for run in runs), max(run["fma_gflops"] for run in runs))


def memory_mb(pid: int, key: str) -> float:
    """A size from /proc/PID/status in MB (10^6 bytes): VmHWM (peak), RssAnon (private), RssFile (mapped files)."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"/proc/{pid}/status has no {key}")
    return int(found[1]) * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
