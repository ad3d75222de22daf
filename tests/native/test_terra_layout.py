"""Terra lays out every struct that a driver shares with C as the C compiler does."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

from engine_worker.driver.compile import INCLUDES, SOURCES, run_terra
from tests.native import driver_abi
from tests.terra_toolchain import needs_terra, toolchain

KERNELS_H = next(path for path in (directory / "glm" / "kernels.h" for directory in INCLUDES) if path.exists())


def compiled(expressions: list[str], directory: Path) -> dict[str, int]:
    """What the C compiler says that they are."""
    lines = "\n".join(f'  printf("%ld\\n", (long)({expression}));' for expression in expressions)
    source, binary = directory / "layout.c", directory / "layout"
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "glm/driver.h"\nint main(void) {{\n{lines}\n}}\n'
    )
    flags = [f"-I{include}" for include in INCLUDES]
    subprocess.run([os.environ.get("CC", "cc"), *flags, str(source), "-o", str(binary)], check=True)
    printed = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(expressions, map(int, printed), strict=True))


@needs_terra
def test_layouts_are_the_c_compilers(tmp_path: Path) -> None:
    printed = run_terra(toolchain(), [SOURCES / "layout.t"], tmp_path)
    laid_out = {expression: int(value) for expression, value in (line.split() for line in printed.splitlines())}
    assert laid_out == compiled(list(laid_out), tmp_path)
    kinds = re.findall(r"\(\*(\w+)\)\(glm_device\*, const glm_\w+_args\*\)", KERNELS_H.read_text())
    assert len(kinds) >= 19
    assert {f"sizeof(glm_{kind}_args)" for kind in kinds} <= laid_out.keys()


def test_the_tests_mirror_of_the_drivers_abi(tmp_path: Path) -> None:
    ours = {f"sizeof(glm_driver_{name})": ctypes.sizeof(struct) for name, struct in driver_abi.STRUCTS.items()}
    ours["sizeof(glm_driver)"] = ctypes.sizeof(driver_abi.Driver)
    for name, struct in driver_abi.STRUCTS.items():
        for field, *_ in struct._fields_:
            ours[f"offsetof(glm_driver_{name}, {field})"] = getattr(struct, field).offset
    assert ours == compiled(list(ours), tmp_path)
