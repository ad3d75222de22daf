"""Where the compilers are that drivers are made with."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from engine_worker.errors import UnsupportedError

# Where `make toolchains` puts Terra and Futhark, unless they are on PATH.
TOOLCHAINS = Path(os.environ.get("GLM_TOOLCHAINS") or Path(__file__).parents[2] / "build" / "toolchains")
TERRA_REMEDY = "`make toolchains`, or set GLM_TOOLCHAINS to a directory with bin/terra"
LINKER_REMEDY = "install gcc or clang, or set CC"


@dataclass(frozen=True, slots=True)
class Toolchain:
    terra: Path
    terra_version: str
    linker: Path


def find_compiler(name: str) -> Path | None:
    """`terra`, `futhark`, ...: among the toolchains or on PATH."""
    found = shutil.which(name, path=os.pathsep.join((str(TOOLCHAINS / "bin"), os.environ.get("PATH", ""))))
    return None if found is None else Path(found)


def find_linker() -> Path | None:
    """A C compiler: Terra makes objects, not shared ones."""
    found = shutil.which(os.environ.get("CC") or "cc")
    return None if found is None else Path(found)


def terra_version(terra: Path) -> str:
    """Raises UnsupportedError if `terra` does not run."""
    try:
        done = subprocess.run(
            [terra, "-e", "print(terralib.version)"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UnsupportedError(f"executor terra: {terra} does not run ({error}): {TERRA_REMEDY}") from error
    return done.stdout.strip()


def find_toolchain() -> Toolchain:
    """Raises UnsupportedError with what is missing and how to get it."""
    terra, linker = find_compiler("terra"), find_linker()
    if terra is None:
        raise UnsupportedError(f"executor terra: no terra in {TOOLCHAINS / 'bin'} or on PATH: {TERRA_REMEDY}")
    if linker is None:
        raise UnsupportedError(f"executor terra: no C compiler to link the driver with: {LINKER_REMEDY}")
    return Toolchain(terra, terra_version(terra), linker)
