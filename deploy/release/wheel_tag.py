"""Hatch's hook: a wheel that holds shared objects is of this platform, one without is for any."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelTag(BuildHookInterface):  # type: ignore[type-arg]
    """Sets the tag from what lies in engine_worker/lib: nothing (the router's wheel), or the runtime and its tables."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatch before the wheel is written."""
        native = any((Path(self.root) / "engine_worker" / "lib").glob("*.so"))
        build_data["pure_python"] = not native
        build_data["tag"] = f"py3-none-{platform_tag()}" if native else "py3-none-any"


def platform_tag() -> str:
    """manylinux of this machine's glibc: older ones may lack symbols that were linked (PEP 600)."""
    library, version = platform.libc_ver()
    machine = sysconfig.get_platform().split("-")[-1].replace(".", "_")
    if library != "glibc":
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"manylinux_{version.replace('.', '_')}_{machine}"
