"""The ctypes mirror: its layout is C's, and it refuses what it cannot pass on."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_worker.errors import CheckpointError, InvalidRequestError, UnsupportedError
from engine_worker.runtime import abi, c_types
from engine_worker.runtime.records import EngineOptions, RankOptions, Sampling, StepBatch, TensorSource

ROOT = Path(__file__).resolve().parents[2]
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "glm_error": c_types.CError,
    "glm_tensor_source": c_types.CTensorSource,
    "glm_rank_options": c_types.CRankOptions,
    "glm_engine_options": c_types.CEngineOptions,
    "glm_engine_progress": c_types.CEngineProgress,
    "glm_engine_info": c_types.CEngineInfo,
    "glm_sampling": c_types.CSampling,
    "glm_page_update": c_types.CPageUpdate,
    "glm_step_batch": c_types.CStepBatch,
    "glm_step_result": c_types.CStepResult,
}
CONSTANTS = {
    "GLM_RUNTIME_VERSION": c_types.RUNTIME_VERSION,
    "GLM_PAGE_SIZE": c_types.PAGE_SIZE,
    "GLM_MAX_STOP_IDS": c_types.MAX_STOP_IDS,
    "GLM_MAX_LOGIT_BIAS": c_types.MAX_LOGIT_BIAS,
    "GLM_MAX_LOGPROBS": c_types.MAX_LOGPROBS,
    "GLM_MAX_IN_FLIGHT": c_types.MAX_IN_FLIGHT,
    "GLM_MAX_DIMS": c_types.MAX_DIMS,
    "GLM_MAX_RANKS": c_types.MAX_RANKS,
    "GLM_PLAN_MIXED": c_types.PLAN_MIXED,
    "GLM_PLAN_DECODE": c_types.PLAN_DECODE,
}


def numbers() -> dict[str, int]:
    """What this module's ctypes say, keyed by the C expression for the same."""
    out = dict(CONSTANTS)
    for name, struct in STRUCTS.items():
        out[f"sizeof({name})"] = ctypes.sizeof(struct)
        for field, *_ in struct._fields_:
            out[f"offsetof({name}, {field})"] = getattr(struct, field).offset
            out[f"sizeof((({name}*)0)->{field})"] = getattr(struct, field).size
    return out


def test_layout_and_constants_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed, as for the build"
    ours = numbers()
    lines = [f'std::printf("%lld\\n", (long long)({expression}));' for expression in ours]
    source = tmp_path / "layout.cpp"
    source.write_text('#include <cstdio>\n#include "glm/runtime.h"\nint main() {\n' + "\n".join(lines) + "\n}\n")
    program = tmp_path / "layout"
    includes = [f"-I{ROOT}/native/include", f"-I{ROOT}/kernels/include"]
    subprocess.run([compiler, "-std=c++20", *includes, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(ours, map(int, printed), strict=True)) == ours


def test_every_field_of_the_header_is_mirrored() -> None:
    header = (ROOT / "native/include/glm/runtime.h").read_text() + (ROOT / "kernels/include/glm/types.h").read_text()
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
    for name, struct in STRUCTS.items():
        match = re.search(rf"typedef struct {name} {{(.*?)}} {name};", header, re.S)
        assert match, name
        declared = [
            re.findall(r"(\w+)(?:\[\w+\])?$", line.split(")(")[0].strip("; ").rstrip(")"))
            for line in match[1].split(";")
            if line.strip()
        ]
        assert len(declared) == len(struct._fields_), name


def test_every_status_has_an_error() -> None:
    assert sorted(abi._ERRORS) == [1, 2, 3, 4, 5, 6]


def test_missing_library_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"native runtime .*absent.so is missing: run `make build`"):
        abi.Library(tmp_path / "absent.so")


def test_foreign_library_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not an object")
    with pytest.raises(UnsupportedError, match="cannot be loaded .*: run `make build`"):
        abi.Library(tmp_path / "text.so")


class NoLibrary(abi.Library):
    """Fails the test if a call gets as far as C."""

    def __init__(self) -> None:
        pass

    def call(self, name: str, *arguments: object) -> None:
        raise AssertionError(f"{name} was called")

    def destroy(self, handle: ctypes.c_void_p) -> None:
        pass


def good_batch() -> dict[str, Any]:
    one = np.zeros(1, np.int32)
    return {
        "token_ids": one,
        "positions": one,
        "seq_slots": one,
        "seq_starts": np.array([0, 1], np.int32),
        "sample_rows": one,
        "page_updates": np.zeros((1, 3), np.int32),
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", np.zeros(1, np.int64), "token_ids: expected contiguous int32 of shape n, got int64"),
        ("token_ids", np.zeros((1, 1), np.int32), "token_ids: expected contiguous int32 of shape n"),
        ("positions", np.zeros(2, np.int32), "positions: expected contiguous int32 of shape 1"),
        ("seq_slots", np.zeros(4, np.int32)[::2], "seq_slots: expected contiguous"),
        ("seq_starts", np.zeros(1, np.int32), "seq_starts: expected contiguous int32 of shape 2"),
        ("sample_rows", np.zeros(1, np.float32), "sample_rows: expected contiguous int32 of shape n, got float32"),
        ("page_updates", np.zeros((1, 2), np.int32), "page_updates: expected contiguous int32 of shape nx3"),
    ],
)
def test_arrays_are_checked(field: str, value: Any, message: str) -> None:
    engine = abi.Engine(NoLibrary(), ctypes.c_void_p())
    with pytest.raises(InvalidRequestError, match=message):
        engine.submit(StepBatch(**{**good_batch(), field: value}))


def test_history_is_checked() -> None:
    engine = abi.Engine(NoLibrary(), ctypes.c_void_p())
    with pytest.raises(InvalidRequestError, match="prompt: expected contiguous int32"):
        engine.bind_slot(0, Sampling(), np.zeros(1, np.int64), np.zeros(0, np.int32))


def test_rank_is_checked() -> None:
    source = TensorSource("t", Path("shard"), 0, 1, "F32", (1, 1, 1, 1, 1))
    options = EngineOptions(Path("k"), [RankOptions("", "")], [source], 1, 1, 1, 16, 1)
    with pytest.raises(CheckpointError, match="tensor t: rank 5, at most 4 is supported"):
        abi.Engine.create(options, NoLibrary())
