"""Every kind of damage to a checkpoint's files is one error that names the tensor, the shard and what was expected."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_worker.errors import CheckpointError
from engine_worker.weights.safetensors_index import INDEX_NAME, SINGLE_NAME, read_checkpoint
from tests.unit.checkpoint_files import Tensors, data_bytes, header_of, tiny_config, write_checkpoint, write_shard

TENSORS: Tensors = {"a": ("F32", [2, 3]), "b": ("BF16", [4]), "empty": ("F8_E4M3", [0, 7]), "c": ("F8_E4M3", [5])}
HEADER = header_of(TENSORS)
SIZE = data_bytes(HEADER)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tmp_path / SINGLE_NAME


def test_single_file_gives_every_tensor_where_it_lies(single: Path) -> None:
    write_shard(single, HEADER | {"__metadata__": {"format": "pt"}}, SIZE)
    found = read_checkpoint(single.parent).tensors
    start = single.stat().st_size - SIZE
    assert {name: (t.dtype, t.shape, t.offset - start, t.nbytes, t.path) for name, t in found.items()} == {
        "a": ("F32", (2, 3), 0, 24, single),
        "b": ("BF16", (4,), 24, 8, single),
        "empty": ("F8_E4M3", (0, 7), 32, 0, single),
        "c": ("F8_E4M3", (5,), 32, 5, single),
    }


def test_scalar_has_shape_of_rank_zero(single: Path) -> None:
    header = header_of({"scale": ("F32", [])})
    write_shard(single, header, 4)
    assert read_checkpoint(single.parent).tensors["scale"].shape == ()


def test_sharded_checkpoint_joins_its_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), TENSORS)
    found = read_checkpoint(tmp_path).tensors
    assert set(found) == set(TENSORS)
    assert found["a"].path == tmp_path / "model-0.safetensors"
    assert found["b"].path == tmp_path / "model-1.safetensors"


def test_digest_tells_headers_apart(tmp_path: Path) -> None:
    digests = set()
    for name, shape in (("x", [4]), ("y", [4]), ("x", [2, 2])):
        directory = tmp_path / f"{name}{len(shape)}"
        write_checkpoint(directory, tiny_config(), {name: ("F32", shape)}, shards=1)
        digests.add(read_checkpoint(directory).digest)
        assert read_checkpoint(directory).digest in digests
    assert len(digests) == 3


def change(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(values)


BROKEN_ENTRIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown dtype": (change("b", dtype="F12"), "tensor b: .*dtype 'F12', expected one of BOOL"),
    "dtype of another type": (change("b", dtype=["F32"]), "tensor b: .*dtype"),
    "bytes and shape": (change("a", shape=[2, 4]), r"tensor a: .*24 bytes, expected 32 for F32 of shape \[2, 4\]"),
    "negative size": (change("a", shape=[-2, -3]), r"tensor a: .*shape \[-2, -3\], expected a list of sizes"),
    "boolean size": (change("a", shape=[True, 6]), "tensor a: .*shape"),
    "fractional size": (change("a", shape=[2.0, 3]), "tensor a: .*shape"),
    "shape of another type": (change("a", shape="2x3"), "tensor a: .*shape '2x3'"),
    "one offset": (change("a", data_offsets=[24]), r"tensor a: .*data_offsets \[24\], expected \[begin, end\]"),
    "offsets reversed": (change("a", data_offsets=[24, 0]), "tensor a: .*with begin <= end"),
    "overlap": (change("b", data_offsets=[20, 28]), "tensor b: .*overlaps tensor a"),
    "gap": (
        lambda header: [
            change(name, data_offsets=[o + 8 for o in header[name]["data_offsets"]])(header) for name in "bc"
        ],
        "tensor .*begins at byte .*, expected .*, where tensor",
    ),
    "outside the file": (change("c", data_offsets=[10**12, 10**12 + 5]), "tensor c: .*truncated to"),
    "missing key": (lambda header: header["a"].pop("shape"), "tensor a: .*expected an object of dtype, shape"),
    "extra key": (change("a", order="C"), "tensor a: .*expected an object of dtype, shape"),
    "entry is a list": (lambda header: header.update(a=[1]), "tensor a: .*expected an object of dtype, shape"),
    "metadata of numbers": (
        lambda header: header.update(__metadata__={"n": 1}),
        "__metadata__: expected an object of str",
    ),
}


@pytest.mark.parametrize("damage", BROKEN_ENTRIES)
def test_broken_header_entry(single: Path, damage: str) -> None:
    break_it, message = BROKEN_ENTRIES[damage]
    header = copy.deepcopy(HEADER)
    break_it(header)
    write_shard(single, header, SIZE)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_checkpoint(single.parent)
    assert str(single) in str(raised.value)
    assert "\n" not in str(raised.value)


BROKEN_HEADERS = {
    "not JSON": (b"{]", "header: not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', "header: byte 2 is not valid UTF-8"),
    "name with a control character": (
        b'{"a\\n": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
        r"tensor name 'a\\n' has characters that cannot be printed",
    ),
    "name with half a character": (
        b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
        r"tensor name '\\ud800' has characters that cannot be printed",
    ),
    "not an object": (b"[]", "header: expected a JSON object, found list"),
    "duplicate tensor": (
        b'{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}',
        "header: not valid JSON .key 'a' appears twice",
    ),
    "nested too deeply": (b'{"a":' + b"[" * 100_000, "header: JSON is nested too deeply"),
    "NaN": (b'{"a": NaN}', "header: not valid JSON .NaN is not a JSON number"),
    "endless number": (b'{"a": ' + b"1" * 5000 + b"}", "header: not valid JSON"),
}


@pytest.mark.parametrize("damage", BROKEN_HEADERS)
def test_broken_header(single: Path, damage: str) -> None:
    raw, message = BROKEN_HEADERS[damage]
    write_shard(single, raw, 0)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_checkpoint(single.parent)
    assert str(single) in str(raised.value)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, "truncated: 0 bytes"),
        (7, "truncated: 7 bytes"),
        (8, "header length .* expected at most 0"),
        (-1, "tensor c: "),
    ],
)
def test_truncated_shard(single: Path, keep: int, message: str) -> None:
    write_shard(single, HEADER, SIZE)
    single.write_bytes(single.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(single.parent)


@pytest.mark.parametrize("length", [2**64 - 1, 100_000_001, 1000])
def test_header_length_is_bounded(single: Path, length: int) -> None:
    single.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match=f"header length {length}, expected at most 2 in 10 bytes"):
        read_checkpoint(single.parent)


def test_bytes_after_the_last_tensor(single: Path) -> None:
    write_shard(single, HEADER, SIZE + 1)
    with pytest.raises(CheckpointError, match="expected .*, where tensor c ends"):
        read_checkpoint(single.parent)


def test_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"neither {INDEX_NAME} nor {SINGLE_NAME}"):
        read_checkpoint(tmp_path)


def rewrite_index(directory: Path, change_map: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((directory / INDEX_NAME).read_text())
    change_map(index["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(index))


def test_index_lists_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), TENSORS)
    rewrite_index(tmp_path, lambda weight_map: weight_map.update(ghost="model-0.safetensors"))
    with pytest.raises(CheckpointError, match="tensor ghost: missing from shard model-0.safetensors"):
        read_checkpoint(tmp_path)


def test_shard_holds_a_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), TENSORS)
    rewrite_index(tmp_path, lambda weight_map: weight_map.pop("c"))
    with pytest.raises(CheckpointError, match=r"tensor c: is in shard model-1.safetensors, but .* does not list it"):
        read_checkpoint(tmp_path)


def test_index_lists_a_tensor_in_another_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), TENSORS)
    rewrite_index(tmp_path, lambda weight_map: weight_map.update(a="model-1.safetensors"))
    with pytest.raises(CheckpointError, match="tensor a: "):
        read_checkpoint(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), TENSORS)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard .*model-1.safetensors: the file is missing"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("shard", ["../model-0.safetensors", "/etc/passwd", 7, "", "..", "a\0b", "\ud800"])
def test_index_may_only_name_files_beside_it(tmp_path: Path, shard: object) -> None:
    write_checkpoint(tmp_path, tiny_config(), TENSORS)
    rewrite_index(tmp_path, lambda weight_map: weight_map.update(a=shard))
    with pytest.raises(CheckpointError, match="tensor 'a': expected the name of a file beside the index"):
        read_checkpoint(tmp_path)


def test_index_without_weight_map(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{INDEX_NAME}: weight_map: expected an object"):
        read_checkpoint(tmp_path)
