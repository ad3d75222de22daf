from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.harness import Array, Chunk, Device, Step, output, tensor


def run(device: Device, x: Array, sample_rows: list[int]) -> Array:
    cols = x.shape[1]
    step = Step([Chunk(0, 0, len(x))], None, sample_rows, [0] * len(sample_rows)).bind()
    bound, out = tensor(x, cols + 5), output(len(sample_rows), cols, x.dtype, cols + 1)
    args = abi.GatherRowsArgs(rows=len(sample_rows), x=bound.struct, out=out.struct)
    args.step.contents = step.struct
    device.run(abi.Op.GATHER_ROWS, args)
    return out.read()


@pytest.mark.parametrize("sample_rows", [[], [0], [6], [6, 0, 3], [2, 2, 2, 2, 2], list(range(7))], ids=str)
@pytest.mark.parametrize("cols", [1, 7, 64, 576, 5120])
def test_copies_the_sampled_rows(
    device: Device, rng: np.random.Generator, act: "np.dtype[Any]", cols: int, sample_rows: list[int]
) -> None:
    x = rng.standard_normal((7, cols)).astype(act)
    assert run(device, x, sample_rows).tobytes() == x[sample_rows].tobytes()
