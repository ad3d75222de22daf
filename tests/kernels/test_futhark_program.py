"""The Futhark programs by themselves: what is generated of the op list, and the vectors in kernels/futhark/tests."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.harness import ROOT

FUTHARK = ROOT / "kernels" / "futhark"
PROGRAMS = sorted((FUTHARK / "tests").glob("*.fut"))
PATH = os.pathsep.join(
    (str(Path(os.environ.get("GLM_TOOLCHAINS") or ROOT / "build" / "toolchains") / "bin"), os.environ["PATH"])
)
ENVIRONMENT = {**os.environ, "LC_ALL": "C.UTF-8", "PATH": PATH}


def generate(out: Path, only: str = ".*") -> tuple[str, str]:
    subprocess.run([sys.executable, FUTHARK / "generate.py", out, only], check=True)
    return (out / "glm.fut").read_text(), (out / "ops.c").read_text()


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("futhark", path=PATH)
    if found is None:
        pytest.skip("no futhark on PATH or under GLM_TOOLCHAINS: `make toolchains`")
    return found


def test_every_operation_of_the_table_is_generated(tmp_path: Path) -> None:
    _, binding = generate(tmp_path)
    declared = re.findall(r"glm_status (glm_futhark_\w+)\(", (FUTHARK / "binding.h").read_text())
    assert len(declared) == 14
    assert sorted(re.findall(r"^glm_status (glm_futhark_\w+)\(", binding, re.MULTILINE)) == sorted(declared)


def test_an_operation_has_a_variant_of_every_choice(tmp_path: Path) -> None:
    program, _ = generate(tmp_path)
    entries = re.findall(r"^entry (\w+)", program, re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert {f"embed_{act}_{weight}" for act in ("f32", "bf16") for weight in ("f32", "bf16", "f16")} <= set(entries)


def test_what_is_left_out_says_so(tmp_path: Path) -> None:
    program, binding = generate(tmp_path, "embed_bf16_bf16|sample")
    assert re.findall(r"^entry (\w+)", program, re.MULTILINE) == ["embed_bf16_bf16", "sample"]
    assert 'glm_unsupported(device, "linear", "these dtypes, or was built without them")' in binding


def test_the_program_is_well_typed(tmp_path: Path, compiler: str) -> None:
    generate(tmp_path)
    checked = subprocess.run(
        [compiler, "check", tmp_path / "glm.fut"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_vectors(program: Path, compiler: str, tmp_path: Path) -> None:
    """On copies: `futhark test` leaves what it compiles beside the program."""
    shutil.copytree(FUTHARK, tmp_path / "futhark")
    copied = tmp_path / "futhark" / "tests" / program.name
    command = [compiler, "test", "--backend=c", "--no-terminal", f"--futhark={compiler}", str(copied)]
    tested = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr
