"""Compiles the plans of ranks to drivers, and keeps them: a plan is compiled once. Needs nothing but Python."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engine_worker.driver.toolchain import Toolchain, find_toolchain
from engine_worker.errors import UnsupportedError
from engine_worker.runtime.records import RankOptions
from glmserve.service.cache import cache_root

ExecutorSetting = Literal["native", "terra", "terra-debug"]

_ROOT = Path(__file__).resolve().parents[2]
# A wheel carries them beside the shared objects.
_INSTALLED = Path(__file__).resolve().parents[1] / "lib" / "terra"
_IN_CHECKOUT = (_ROOT / "native" / "terra").is_dir()
SOURCES = _ROOT / "native" / "terra" if _IN_CHECKOUT else _INSTALLED
INCLUDES = (_ROOT / "native" / "include", _ROOT / "kernels" / "include") if _IN_CHECKOUT else (_INSTALLED / "include",)


@dataclass(frozen=True, slots=True)
class Source:
    """What a driver is made from."""

    mixed_plan: str
    decode_plan: str
    rank: int
    num_ranks: int
    debug: bool = False  # with the checks that release builds leave out

    @property
    def build(self) -> str:
        return "debug" if self.debug else "release"


def with_executor(ranks: Sequence[RankOptions], executor: ExecutorSetting) -> list[RankOptions]:
    """The ranks of one engine, in order, with the drivers that `executor` asks for.

    Raises UnsupportedError: a compiler is missing, or refuses a plan.
    """
    if executor == "native":
        return list(ranks)
    toolchain = find_toolchain()

    def driven(index: int) -> RankOptions:
        rank = ranks[index]
        source = Source(rank.mixed_plan, rank.decode_plan, index, len(ranks), executor == "terra-debug")
        return replace(rank, driver=driver_of(source, toolchain))

    with ThreadPoolExecutor(max_workers=min(len(ranks), len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(driven, range(len(ranks))))


def driver_of(source: Source, toolchain: Toolchain) -> Path:
    """From the cache, or compiled now. Raises UnsupportedError if a compiler refuses."""
    directory = cache_root() / "drivers"
    driver = directory / f"{_key(source, toolchain)}.so"
    if driver.exists():
        return driver
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".compiling-", dir=directory) as name:
        made = compile_driver(source, toolchain, Path(name))
        made.replace(driver)  # whoever is first or last, it is the same
    return driver


def compile_driver(source: Source, toolchain: Toolchain, directory: Path) -> Path:
    """Compile and link in `directory`, which nothing else uses; nothing is left anywhere else."""
    plans = {directory / "mixed": source.mixed_plan, directory / "decode": source.decode_plan}
    for path, text in plans.items():
        path.write_text(text)
    compiled, linked = directory / "driver.o", directory / "driver.so"
    share = (str(source.rank), str(source.num_ranks), source.build)
    run_terra(toolchain, [SOURCES / "compile.t", compiled, *plans, *share], directory)
    _run([toolchain.linker, "-shared", compiled, "-o", linked], directory)
    return linked


def run_terra(toolchain: Toolchain, arguments: Sequence[str | Path], directory: Path) -> str:
    """What it prints. Its temporary files go into `directory`."""
    return _run([toolchain.terra, *arguments], directory)


def _run(command: Sequence[str | Path], directory: Path) -> str:
    environment = {**os.environ, "INCLUDE": os.pathsep.join(map(str, INCLUDES)), "TMPDIR": str(directory)}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())
        raise UnsupportedError(f"executor terra: {command[0]} failed: {said}")
    return done.stdout


def _key(source: Source, toolchain: Toolchain) -> str:
    """Of all that a driver is made from: the headers have the ABI's versions and layouts."""
    share = f"{source.rank}/{source.num_ranks} {source.build} {toolchain.terra_version}"
    texts = (source.mixed_plan, source.decode_plan, share)
    headers = [path for directory in INCLUDES for path in sorted(directory.rglob("*.h"))]
    digest = hashlib.sha256()
    for part in (*map(str.encode, texts), *(path.read_bytes() for path in [*sorted(SOURCES.glob("*.t")), *headers])):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
