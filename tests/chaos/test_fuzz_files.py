"""Whatever the bytes of the files that a router reads, it starts or says in one line what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glmserve.service.settings import SettingsError
from router.access.keys import key_hash, read_keys
from router.config import RouterConfig
from router.errors import CheckpointError
from router.model import TextModel
from tests.fuzzing import damaged, fuzz
from tests.unit.router_harness import write_model

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
KEYS = f'[[key]]\nname = "alice"\nhash = "{key_hash("x")}"\nmax_requests = 4\n'
SETTINGS = 'model = "m"\nworker = "127.0.0.1:1"\nlisten = "127.0.0.1:0"\nmax_requests = 10\nheartbeat_s = 1.5\n'


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as root:
        yield write_model(Path(root))


def one_line(error: Exception) -> None:
    assert str(error)
    assert "\n" not in str(error)
    str(error).encode()


@fuzz(60)
@given(st.sampled_from(FILES), st.data())
def test_a_model_directory(directory: Path, file: str, data: st.DataObject) -> None:
    path = directory / file
    whole = path.read_bytes()
    path.write_bytes(data.draw(damaged(st.just(whole))))
    try:
        TextModel.load(directory)
    except CheckpointError as error:
        one_line(error)
    finally:
        path.write_bytes(whole)


@fuzz(100)
@given(damaged(st.just(KEYS.encode())) | st.binary(max_size=100))
def test_a_keys_file(directory: Path, content: bytes) -> None:
    path = directory / "keys.toml"
    path.write_bytes(content)
    try:
        read_keys(path)
    except SettingsError as error:
        assert str(path) in str(error)


@fuzz(100)
@given(damaged(st.just(SETTINGS.encode())) | st.binary(max_size=100))
def test_a_settings_file(directory: Path, content: bytes) -> None:
    path = directory / "router.toml"
    path.write_bytes(content)
    try:
        RouterConfig.load(["--config", str(path)], prog="glm router")
    except SettingsError as error:
        assert str(error)
