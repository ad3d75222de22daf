"""The ctypes mirror has the layout, the constants and the enum values that the C compiler gives kernels/include/glm."""

import ctypes
import enum
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.kernels import abi
from tests.kernels.harness import ROOT

INCLUDE = ROOT / "kernels" / "include"
HEADER = "".join(path.read_text() for path in sorted((INCLUDE / "glm").glob("*.h")))
STRUCTS = [value for value in vars(abi).values() if isinstance(value, type) and issubclass(value, ctypes.Structure)]
ENUMS = {abi.Status: "GLM_", abi.Dtype: "GLM_", abi.WeightFormat: "GLM_W_", abi.Op: "GLM_OP_"}
CONSTANTS = {
    "GLM_KERNELS_VERSION": abi.VERSION,
    "GLM_TABLE_HOST_MEMORY": abi.HOST_MEMORY,
    "GLM_PAGE_SIZE": abi.PAGE_SIZE,
    "GLM_MAX_RANKS": abi.MAX_RANKS,
    "GLM_MAX_PARTS": abi.MAX_PARTS,
    "GLM_MAX_STOP_IDS": abi.MAX_STOP_IDS,
    "GLM_MAX_LOGIT_BIAS": abi.MAX_LOGIT_BIAS,
    "GLM_MAX_LOGPROBS": abi.MAX_LOGPROBS,
    "GLM_FP8_MAX": int(abi.FP8_MAX),
    "GLM_FP8_BLOCK": abi.FP8_BLOCK,
}


def c_name(struct: type[ctypes.Structure]) -> str:
    return "glm_" + re.sub(r"(?<!^)(?=[A-Z])", "_", struct.__name__).lower()


def mirrored() -> dict[str, int]:
    """C expression -> the mirror's value of it."""
    values = dict(CONSTANTS)
    for enumeration, prefix in ENUMS.items():
        values.update({prefix + member.name: int(member) for member in enumeration})
    for struct in STRUCTS:
        name = c_name(struct)
        values[f"sizeof({name})"] = ctypes.sizeof(struct)
        for field in struct._fields_:
            descriptor = getattr(struct, field[0])
            values[f"offsetof({name}, {field[0]})"] = descriptor.offset
            values[f"sizeof((({name}*)0)->{field[0]})"] = descriptor.size
    return values


def test_the_mirror_has_the_compilers_layout(tmp_path: Path) -> None:
    expected = mirrored()
    lines = "\n".join(f'  printf("%ld\\n", (long)({expression}));' for expression in expected)
    source = tmp_path / "layout.c"
    source.write_text(f"#include <stdio.h>\n#include <glm/kernels.h>\nint main(void) {{\n{lines}\n  return 0;\n}}\n")
    binary = tmp_path / "layout"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-std=c11", "-I", str(INCLUDE), str(source), "-o", str(binary)], check=True)
    printed = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.split()
    actual = dict(zip(expected, map(int, printed), strict=True))
    assert actual == expected


def test_every_struct_of_the_header_is_mirrored() -> None:
    declared = set(re.findall(r"^typedef struct (glm_\w+) \{", HEADER, re.MULTILINE))
    assert declared == {c_name(struct) for struct in STRUCTS}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_field_is_mirrored_in_order(struct: type[ctypes.Structure]) -> None:
    found = re.search(r"typedef struct " + c_name(struct) + r" \{(.*?)\n\}", HEADER, re.DOTALL)
    assert found is not None
    body = re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    pattern = r"\(\*(\w+)\)\(|(\w+)(?:\[\w+\])?;"
    names = [pointer or plain for pointer, plain in re.findall(pattern, re.sub(r"\)\([^;]*;", ")(;", body))]
    assert names == [field[0] for field in struct._fields_]


@pytest.mark.parametrize("enumeration", ENUMS, ids=lambda enumeration: enumeration.__name__)
def test_every_enumerator_is_mirrored(enumeration: type[enum.IntEnum]) -> None:
    name = "glm_" + re.sub(r"(?<!^)(?=[A-Z])", "_", enumeration.__name__).lower()
    found = re.search(r"typedef enum " + name + r" \{(.*?)\} " + name + ";", HEADER, re.DOTALL)
    assert found is not None
    body = re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    names = re.findall(r"GLM_\w+", body)
    assert names == [ENUMS[enumeration] + member.name for member in enumeration]
