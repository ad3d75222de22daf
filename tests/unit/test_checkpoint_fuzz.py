"""Whatever the bytes of a checkpoint's files, reading it gives a model or one of our errors, in one line."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.errors import CheckpointError, UnsupportedError
from engine_worker.models import build_model
from tests.fuzzing import fuzz
from tests.unit.checkpoint_files import CHANNEL_QUANTIZATION, tiny_config, tiny_tensors, write_checkpoint

FILES = ("config.json", "model.safetensors.index.json", "model-0.safetensors")


@pytest.fixture(scope="module")
def pristine() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "pristine"
        config = tiny_config(num_hidden_layers=1, quantization_config=CHANNEL_QUANTIZATION)
        write_checkpoint(directory, config, tiny_tensors(config, "F8_E4M3"))
        yield directory


@fuzz(150)
@given(
    file=st.sampled_from(FILES),
    at=st.floats(0, 1),
    length=st.integers(0, 40),
    replacement=st.binary(max_size=40)
    | st.sampled_from([b"null", b"-1", b"1e999", b"[]", b'"\\ud800"', b"\xff", b"{"]),
)
def test_damaged_bytes(pristine: Path, file: str, at: float, length: int, replacement: bytes) -> None:
    directory = pristine.with_name("damaged")
    shutil.copytree(pristine, directory, dirs_exist_ok=True)
    data = (directory / file).read_bytes()
    begin = int(at * min(len(data), 4000))  # headers and keys, rather than the zeros after them
    (directory / file).write_bytes(data[:begin] + replacement + data[begin + length :])
    try:
        build_model(directory)
    except (CheckpointError, UnsupportedError) as error:
        assert "\n" not in str(error)
        str(error).encode()
