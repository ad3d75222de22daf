"""The pinned tarballs of Terra and Futhark, without fetching them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

TOOLCHAINS = Path(__file__).parents[2] / "deploy" / "toolchains"
SCRIPT = (TOOLCHAINS / "fetch.sh").read_text()
TARBALLS = [f"{name}.tar.xz" for name in re.findall(r"^(?:TERRA|FUTHARK)=(\S+)$", SCRIPT, re.MULTILINE)]


@pytest.fixture
def into(tmp_path: Path) -> Path:
    """A directory where both tarballs seem to have been fetched."""
    shutil.copytree(TOOLCHAINS, tmp_path / "toolchains")
    into = tmp_path / "into"
    (into / "downloads").mkdir(parents=True)
    for name in TARBALLS:
        (into / "downloads" / name).write_bytes(b"something else")
    return into


def fetch(into: Path) -> subprocess.CompletedProcess[str]:
    script = into.parent / "toolchains" / "fetch.sh"
    return subprocess.run(["bash", script, into], capture_output=True, text=True, check=False, timeout=60)


def test_both_are_pinned() -> None:
    pinned = dict(line.split()[::-1] for line in (TOOLCHAINS / "SHA256SUMS").read_text().splitlines())
    assert sorted(pinned) == sorted(TARBALLS)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pinned.values())


def test_another_file_is_refused_and_not_unpacked(into: Path) -> None:
    done = fetch(into)
    assert done.returncode == 1
    assert f"{TARBALLS[0]} is not what" in done.stderr
    assert "delete it and fetch again" in done.stderr
    assert list((into / "bin").iterdir()) == []


def test_what_is_not_pinned_is_refused_and_says_how_to_pin_it(into: Path) -> None:
    sums = into.parent / "toolchains" / "SHA256SUMS"
    sums.write_text("")
    done = fetch(into)
    assert done.returncode == 1
    assert f"does not pin {TARBALLS[0]}: add the SHA-256 from its release page" in done.stderr
    assert sums.read_text() == ""
