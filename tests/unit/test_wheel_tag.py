"""What a wheel says that it runs on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

from deploy.release.wheel_tag import WheelTag, platform_tag


def tagged(root: Path) -> dict[str, Any]:
    build_data: dict[str, Any] = {}
    hook = WheelTag(str(root), {}, None, None, str(root), "wheel")  # type: ignore[arg-type]
    hook.initialize("standard", build_data)
    return build_data


def test_without_shared_objects_it_runs_anywhere(tmp_path: Path) -> None:
    assert tagged(tmp_path) == {"pure_python": True, "tag": "py3-none-any"}


def test_with_shared_objects_it_is_of_this_platform(tmp_path: Path) -> None:
    (tmp_path / "engine_worker" / "lib").mkdir(parents=True)
    (tmp_path / "engine_worker" / "lib" / "libglm_runtime.so").touch()
    assert tagged(tmp_path) == {"pure_python": False, "tag": f"py3-none-{platform_tag()}"}


def test_the_tag_names_the_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert platform_tag().startswith("manylinux_2_36_")
