from typing import Any

import numpy as np
import pytest

from tests.kernels import abi
from tests.kernels.cases_rows import ROW_CASES, RowsCase
from tests.kernels.harness import BF16, F16, F32, FORMATS, Array, Chunk, Device, SlotState, Step, output, weight

VOCAB = 37


def run(
    device: Device, table: Array, tokens: list[int], last_token: list[int], act: "np.dtype[Any]", row_slots: list[int]
) -> Array:
    cols = table.shape[1]
    step = Step([Chunk(slot, 0, 1) for slot in row_slots], tokens)
    out = output(step.rows, cols, act, cols + 3)
    state = SlotState(np.zeros((len(last_token), 1), np.int32), last_token=np.asarray(last_token, np.int32))
    slots, bound, rows = state.bind(), step.bind(), weight(table)
    args = abi.EmbedArgs(rows=step.rows, table=rows.struct, format=FORMATS[table.dtype], out=out.struct)
    args.step.contents, args.slots.contents = bound.struct, slots.struct
    device.run(abi.Op.EMBED, args)
    return out.read()


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("case", ROW_CASES, ids=str)
def test_looks_up_rows(
    device: Device, rng: np.random.Generator, case: RowsCase, dtype: "np.dtype[Any]", act: "np.dtype[Any]"
) -> None:
    table = rng.standard_normal((VOCAB, case.cols)).astype(dtype)
    tokens = rng.integers(0, VOCAB, case.rows).tolist()
    actual = run(device, table, tokens, [5] * max(case.rows, 1), act, list(range(case.rows)))
    expected = table[tokens].astype(np.float32).astype(act)
    assert actual.tobytes() == expected.tobytes()


def test_minus_one_reads_the_slots_last_token(device: Device, rng: np.random.Generator) -> None:
    table = rng.standard_normal((VOCAB, 24)).astype(BF16)
    actual = run(device, table, [-1, 3, -1, VOCAB - 1], [10, 11, VOCAB - 1, 0], F32, [2, 0, 3, 1])
    assert actual.tobytes() == table[[VOCAB - 1, 3, 0, VOCAB - 1]].astype(np.float32).tobytes()
