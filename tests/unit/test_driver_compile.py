"""Compilers found or missing, and drivers kept: with scripts in the place of Terra and of the C compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.steps.doctor import examine
from engine_worker.driver import toolchain
from engine_worker.driver.compile import Source, driver_of, with_executor
from engine_worker.driver.toolchain import Toolchain, find_toolchain
from engine_worker.errors import UnsupportedError
from engine_worker.runtime.records import RankOptions

RANKS = [RankOptions("mixed 0", "decode 0"), RankOptions("mixed 1", "decode 1")]
# What terra is called with: the source, the object to write, the plans, the rank and the build.
TERRA = '#!/bin/sh\nif [ "$1" = -e ]; then echo 9.9; exit; fi\necho "$@" >> {log}\ncat "$3" "$4" > "$2"\n'
LINKER = '#!/bin/sh\ncp "$2" "$4"\n'


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A line for each plan that is compiled; the two compilers are all that is found."""
    log = tmp_path / "log"
    script(tmp_path / "tools" / "bin" / "terra", TERRA.format(log=log))
    monkeypatch.setattr(toolchain, "TOOLCHAINS", tmp_path / "tools")
    monkeypatch.setenv("CC", str(script(tmp_path / "cc", LINKER)))
    monkeypatch.setenv("GLM_CACHE_DIR", str(tmp_path / "cache"))
    return log


def compiled(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_native_needs_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "TOOLCHAINS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert with_executor(RANKS, "native") == RANKS


def test_what_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "TOOLCHAINS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnsupportedError, match="no terra in .* or on PATH: `make toolchains`, or set"):
        with_executor(RANKS, "terra")
    (found,) = (finding for finding in examine() if finding.part == "terra")
    assert found.found is None and "make toolchains" in found.remedy and not found.required
    script(tmp_path / "bin" / "terra", "#!/bin/sh\n")
    with pytest.raises(UnsupportedError, match="no C compiler .*: install gcc or clang, or set CC"):
        find_toolchain()
    (found,) = (finding for finding in examine() if finding.part == "terra")
    assert found.found is None and "install gcc or clang" in found.remedy


def test_a_terra_that_does_not_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "TOOLCHAINS", tmp_path)
    path = script(tmp_path / "bin" / "terra", "#!/bin/sh\nexit 3\n")
    with pytest.raises(UnsupportedError, match=f"{path} does not run"):
        find_toolchain()


def test_a_plan_is_compiled_once(log: Path) -> None:
    first = with_executor(RANKS, "terra")
    assert compiled(log) == 2 and len({rank.driver for rank in first}) == 2
    assert with_executor(RANKS, "terra") == first and compiled(log) == 2
    for rank, plans in zip(first, RANKS, strict=True):
        assert rank.driver is not None
        assert rank.driver.read_text() == plans.mixed_plan + plans.decode_plan
        assert list(rank.driver.parent.glob(".*")) == []


def test_whatever_differs_makes_another_driver(log: Path) -> None:
    found = find_toolchain()
    sources = [
        Source("a", "b", 0, 1),
        Source("ab", "", 0, 1),
        Source("a", "c", 0, 1),
        Source("a", "b", 0, 2),
        Source("a", "b", 1, 2),
        Source("a", "b", 0, 1, debug=True),
    ]
    drivers = [driver_of(source, found) for source in sources]
    drivers.append(driver_of(sources[0], Toolchain(found.terra, "9.10", found.linker)))
    assert len(set(drivers)) == len(drivers) == compiled(log)


def test_a_compiler_that_fails_leaves_nothing(log: Path, tmp_path: Path) -> None:
    script(tmp_path / "tools" / "bin" / "terra", "#!/bin/sh\n[ $1 = -e ] || { echo line 7: wrong >&2; exit 1; }\n")
    with pytest.raises(UnsupportedError, match=r"executor terra: .*/terra failed: line 7: wrong"):
        with_executor(RANKS, "terra")
    assert list((tmp_path / "cache" / "drivers").iterdir()) == []
