"""Each kind of damage to a checkpoint stops the load with an error that names tensor, shard and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_worker.errors import CheckpointError
from engine_worker.runtime.abi import Engine
from engine_worker.runtime.records import TensorSource
from tests.native import tiny
from tests.native.fault_table import FaultTable

SHARD = "more.safetensors"
CHANNEL = ["matrix w fp8_channel 4 6", "part tensor=w rows=2:6 cols=1:7 scale=w.scale bias=w.bias"]
BLOCK = ["matrix w fp8_block 10 130", "part tensor=w rows=128:138 cols=0:130 scale=w.scale"]
EXPERTS = ["experts e fp8_channel 2 4 6 first=1 rows=0:4 cols=0:6 tensor=e.{e} scale=e.{e}.scale"]


def codes(*shape: int) -> NDArray[np.uint8]:
    return np.zeros(shape, np.uint8)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


CHANNEL_TENSORS: dict[str, NDArray[Any]] = {"w": codes(8, 8), "w.scale": floats(8, 1), "w.bias": floats(8)}
BLOCK_TENSORS: dict[str, NDArray[Any]] = {"w": codes(140, 130), "w.scale": floats(2, 2)}


@pytest.fixture
def load(faults: FaultTable, tensors: list[TensorSource], tmp_path: Path) -> Callable[..., None]:
    """Creates an engine whose plan has `lines` more, from `arrays` written as a second shard."""

    def create(
        lines: list[str],
        arrays: dict[str, NDArray[Any]],
        change: Callable[[TensorSource], TensorSource] = lambda source: source,
        gap: int = 0,
        **options: Any,
    ) -> None:
        sources = [change(source) for source in tiny.write_shard(tmp_path / SHARD, arrays, gap)]
        mixed = tiny.plan("mixed", *lines)
        Engine.create(tiny.options(faults.path, [*tensors, *sources], mixed_plan=mixed, **options)).close()

    return create


def shaped(tensor: str, *shape: int) -> Callable[[TensorSource], TensorSource]:
    return lambda source: replace(source, shape=shape) if source.name == tensor else source


def test_good_weights_load(load: Callable[..., None]) -> None:
    load(CHANNEL, CHANNEL_TENSORS)
    load(BLOCK, BLOCK_TENSORS)
    load(EXPERTS, {name: a for e in (1, 2) for name, a in ((f"e.{e}", codes(4, 6)), (f"e.{e}.scale", floats(4)))})
    load(["vector v 3 tensor=v rows=1:4"], {"v": np.ones(4, np.float16)})
    load(["vector v 4 tensor=v"], {"v": np.zeros(4, np.uint16)})


@pytest.mark.parametrize(
    ("lines", "arrays", "message"),
    [
        (CHANNEL, {**CHANNEL_TENSORS, "w": codes(5, 8)}, "fp8 of shape [5, 8], but matrix w expects fp8 of at least"),
        (
            CHANNEL,
            {**CHANNEL_TENSORS, "w": codes(8, 6)},
            "shape [8, 6], but matrix w expects fp8 of at least shape [6, 7]",
        ),
        (CHANNEL, {**CHANNEL_TENSORS, "w": codes(64)}, "tensor w in"),
        (CHANNEL, {**CHANNEL_TENSORS, "w": floats(8, 8)}, "f32 of shape [8, 8], but matrix w expects fp8"),
        (CHANNEL, {**CHANNEL_TENSORS, "w.scale": floats(7, 1)}, "expects a float of shape [8, 1]"),
        (CHANNEL, {**CHANNEL_TENSORS, "w.scale": floats(8, 2)}, "one scale per output channel"),
        (CHANNEL, {**CHANNEL_TENSORS, "w.scale": codes(8, 1)}, "expects f32, bf16 or f16"),
        (CHANNEL, {**CHANNEL_TENSORS, "w.bias": floats(5)}, "expects a float of at least shape [6]"),
        (
            CHANNEL,
            {k: v for k, v in CHANNEL_TENSORS.items() if k != "w.scale"},
            "tensor w.scale: not in the checkpoint",
        ),
        (
            CHANNEL,
            {k: v for k, v in CHANNEL_TENSORS.items() if k != "w"},
            "tensor w: not in the checkpoint, but matrix w",
        ),
        (BLOCK, {**BLOCK_TENSORS, "w.scale": floats(2, 1)}, "expects a float of shape [2, 2]: one scale per 128x128"),
        (["vector v 3 tensor=v"], {"v": floats(2)}, "tensor v in"),
        (["vector v 3 tensor=v"], {"v": floats(3, 1)}, "f32 of shape [3, 1], but vector v expects"),
        (["vector v 3 tensor=v"], {"v": np.array([1, np.nan, 1], np.float32)}, "nan at index 1, expected finite"),
        (["vector v 2 tensor=v rows=1:3"], {"v": np.array([1, 1, np.inf], np.float16)}, "inf at index 2"),
        (EXPERTS, {"e.1": codes(4, 6), "e.1.scale": floats(4)}, "tensor e.2: not in the checkpoint, but experts e"),
    ],
)
def test_wrong_tensor(load: Callable[..., None], lines: list[str], arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(lines, arrays)
    assert message in str(caught.value)
    assert SHARD in str(caught.value) or "not in the checkpoint" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shaped("w", 8, 9), "tensor w in {}: 64 bytes, expected what shape and dtype F8_E4M3 make: 72"),
        (shaped("w", -8, -8), "more than 64 bits hold"),
        (shaped("w", 2**40, 2**40), "more than 64 bits hold"),
        (
            lambda s: replace(s, dtype="F8_E5M2"),
            "tensor w in {}: dtype F8_E5M2, expected one of F32, BF16, F16, F8_E4M3",
        ),
        (lambda s: replace(s, offset=2**64 - 1), "but the file has"),
        (lambda s: replace(s, offset=10**6), "bytes 1000000 to 1000064, but the file has"),
        (lambda s: replace(s, path=s.path.with_name("gone")), "gone: cannot be opened: No such file"),
        (lambda s: replace(s, name="w"), "tensor w is listed twice"),
    ],
)
def test_wrong_source(load: Callable[..., None], tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(CHANNEL, CHANNEL_TENSORS, change=change)
    assert message.format(tmp_path / SHARD) in str(caught.value)


def test_empty_shard(load: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(CheckpointError, match="empty: bytes 0 to 64, but the file has 0"):
        load(CHANNEL, CHANNEL_TENSORS, change=lambda source: replace(source, path=tmp_path / "empty", offset=0))


def test_fp8_may_lie_anywhere(load: Callable[..., None]) -> None:
    lines = ["matrix w fp8_channel 4 6", "part tensor=w rows=0:4 cols=0:6 scale=s"]
    odd = {"w": lambda source: replace(source, offset=source.offset + 1, nbytes=64, shape=(8, 8))}
    arrays = {"s": floats(8), "w": codes(9, 8)}
    load(lines, arrays, change=lambda source: odd.get(source.name, lambda same: same)(source))


def test_wider_elements_are_aligned(load: Callable[..., None]) -> None:
    with pytest.raises(CheckpointError, match=r"tensor v in .* offset 1 is not a multiple of its 4-byte element"):
        load(["vector v 3 tensor=v"], {"v": floats(3)}, gap=1)
    with pytest.raises(CheckpointError, match=r"tensor m in .* offset 1 is not a multiple of its 2-byte element"):
        load(["matrix m bf16 2 2", "part tensor=m rows=0:2 cols=0:2"], {"m": np.zeros((2, 2), np.uint16)}, gap=1)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("index", [17, 22, 8 * 5 + 6])
def test_fp8_nan(load: Callable[..., None], code: int, index: int) -> None:
    array = codes(8, 8)
    array.flat[index] = code
    with pytest.raises(CheckpointError, match=rf"tensor w in .*: NaN at index {index}, expected finite FP8 values"):
        load(CHANNEL, {**CHANNEL_TENSORS, "w": array})


def test_fp8_nan_outside_the_slice_is_not_read(load: Callable[..., None]) -> None:
    array = codes(8, 8)
    array[:2] = array[6:] = array[:, 0] = array[:, 7] = 0x7F
    load(CHANNEL, {**CHANNEL_TENSORS, "w": array})


def test_every_other_code_is_finite(load: Callable[..., None]) -> None:
    array = np.array([code for code in range(256) if code not in (0x7F, 0xFF)] + [0, 0], np.uint8).reshape(2, 128)
    load(["matrix w fp8_channel 2 128", "part tensor=w rows=0:2 cols=0:128 scale=s"], {"w": array, "s": floats(2)})


def test_progress_and_byte_counts(faults: FaultTable, tmp_path: Path, tensors: list[TensorSource]) -> None:
    """A weight that two names share counts once; the first report says that nothing is done, the last that all is."""
    tied = [
        f"matrix head f32 {tiny.VOCAB} {tiny.HIDDEN}",
        f"part tensor=table rows=0:{tiny.VOCAB} cols=0:{tiny.HIDDEN}",
    ]
    reports: list[tuple[int, int]] = []
    options = tiny.options(
        faults.path,
        [*tensors, *tiny.write_shard(tmp_path / SHARD, {"v": floats(5)})],
        mixed_plan=tiny.plan("mixed", *tied, "vector v 5 tensor=v"),
        progress=lambda done, total: reports.append((done, total)),
    )
    mapped = tiny.VOCAB * tiny.HIDDEN * 4
    with Engine.create(options) as engine:
        assert engine.info().weight_bytes_mapped == mapped
        assert engine.info().weight_bytes_copied == 5 * 4
    assert (reports[0], reports[-1]) == ((0, mapped), (mapped, mapped))
    assert all(done <= total == mapped for done, total in reports)


def test_progress_may_stop_the_load(faults: FaultTable, tensors: list[TensorSource]) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.create(tiny.options(faults.path, tensors, progress=interrupt))
