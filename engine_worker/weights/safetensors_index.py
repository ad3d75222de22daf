"""Which tensors a checkpoint directory holds and where each lies, read from safetensors headers alone.

Format: 8 bytes little-endian header length, a JSON header, then the data, which the tensors cover without overlap or
gap (https://github.com/huggingface/safetensors#format). Everything is checked here, so that no later reader has to.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine_worker.errors import CheckpointError
from engine_worker.runtime.records import TensorSource
from engine_worker.weights.strict_json import parse_json_object, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ELEMENT_BYTES = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
    }
)
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a directory by name, and a SHA-256 over its index and shard headers."""

    directory: Path
    tensors: Mapping[str, TensorSource]
    digest: str


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read the index and every shard's header of `directory`.

    Raises CheckpointError naming the tensor, the shard and what was expected.
    """
    index_path = directory / INDEX_NAME
    digest = hashlib.sha256()
    if not index_path.exists():
        single = directory / SINGLE_NAME
        if not single.exists():
            raise CheckpointError(f"{directory}: neither {INDEX_NAME} nor {SINGLE_NAME} is there")
        return Checkpoint(directory, MappingProxyType(read_shard(single, digest)), digest.hexdigest())
    shard_of = _read_index(index_path, digest)
    tensors: dict[str, TensorSource] = {}
    for shard in sorted(set(shard_of.values())):
        found = read_shard(directory / shard, digest)
        for name in found:
            if shard_of.get(name) != shard:
                listed = f"lists it in {shard_of[name]}" if name in shard_of else "does not list it"
                raise CheckpointError(f"tensor {name}: is in shard {shard}, but {index_path} {listed}")
        tensors.update(found)
    for name, shard in shard_of.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name}: missing from shard {shard}, where {index_path} lists it")
    return Checkpoint(directory, MappingProxyType(tensors), digest.hexdigest())


def _read_index(path: Path, digest: hashlib._Hash) -> dict[str, str]:
    index, data = read_json_object(path)
    digest.update(data)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map: expected an object of tensor name to shard, found {weight_map!r}")
    for name, shard in weight_map.items():
        if not _is_file_name(shard):
            raise CheckpointError(
                f"{path}: tensor {name!a}: expected the name of a file beside the index, found {shard!a}"
            )
    return weight_map


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and "/" not in value and value not in ("", ".", "..")


def read_shard(path: Path, digest: hashlib._Hash) -> dict[str, TensorSource]:
    """The tensors of one shard in order of offset; its header goes into `digest`. Raises CheckpointError."""
    header_bytes, size = _read_header(path)
    digest.update(header_bytes)
    data_start = _LENGTH_BYTES + len(header_bytes)
    header = parse_json_object(header_bytes, f"shard {path}: header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"shard {path}: __metadata__: expected an object of strings")
    tensors = [_tensor(path, name, entry, data_start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_coverage(path, tensors, data_start, size)
    return {tensor.name: tensor for tensor in tensors}


def _read_header(path: Path) -> tuple[bytes, int]:
    """The header's bytes and the size of the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(_LENGTH_BYTES)
            if len(prefix) < _LENGTH_BYTES:
                raise CheckpointError(f"shard {path}: truncated: {size} bytes, expected at least {_LENGTH_BYTES}")
            (length,) = struct.unpack("<Q", prefix)
            limit = min(MAX_HEADER_BYTES, size - _LENGTH_BYTES)
            if length > limit:
                raise CheckpointError(f"shard {path}: header length {length}, expected at most {limit} in {size} bytes")
            return file.read(length), size
    except FileNotFoundError:
        raise CheckpointError(f"shard {path}: the file is missing") from None
    except OSError as error:
        raise CheckpointError(f"shard {path}: cannot be read ({error.strerror})") from error


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorSource:
    where = f"tensor {name}: in shard {path}"
    if not name.isprintable():
        raise CheckpointError(f"shard {path}: tensor name {name!a} has characters that cannot be printed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected an object of dtype, shape and data_offsets, found {entry!r:.200}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{where}: dtype {dtype!r}, expected one of {', '.join(ELEMENT_BYTES)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape {shape!r}, expected a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets {offsets!r}, expected [begin, end] with begin <= end")
    expected = math.prod(shape) * ELEMENT_BYTES[dtype]
    nbytes = offsets[1] - offsets[0]
    if nbytes != expected:
        raise CheckpointError(f"{where}: {nbytes} bytes, expected {expected} for {dtype} of shape {shape}")
    return TensorSource(name, path, data_start + offsets[0], nbytes, dtype, tuple(shape))


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _check_coverage(path: Path, tensors: list[TensorSource], data_start: int, size: int) -> None:
    """The data section is covered from its first byte to its last, each byte once."""
    end, before = data_start, "the header"
    for tensor in tensors:
        where = f"tensor {tensor.name}: in shard {path}"
        if tensor.offset + tensor.nbytes > size:
            raise CheckpointError(
                f"{where}: ends at byte {tensor.offset + tensor.nbytes}, but the file is truncated to {size} bytes"
            )
        if tensor.offset < end:
            raise CheckpointError(f"{where}: begins at byte {tensor.offset} and overlaps {before}, which ends at {end}")
        if tensor.offset > end:
            raise CheckpointError(f"{where}: begins at byte {tensor.offset}, expected {end}, where {before} ends")
        end, before = tensor.offset + tensor.nbytes, f"tensor {tensor.name}"
    if end != size:
        raise CheckpointError(f"shard {path}: {size} bytes, expected {end}, where {before} ends")
