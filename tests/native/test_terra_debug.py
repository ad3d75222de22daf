"""What a debug build checks and a release build leaves out, on a driver called through its C ABI alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine_worker.driver.compile import Source, compile_driver
from tests.kernels import abi
from tests.native import driver_abi as driver
from tests.native import tiny
from tests.terra_toolchain import needs_terra, toolchain

pytestmark = needs_terra

MAX_ROWS, MAX_SAMPLES = 5, 3
GLM_OK, GLM_INVALID_ARGUMENT, GLM_INTERNAL = 0, 1, 6
# A context begins with four pointers and two counts; then comes the first op, whose `rows` 4 bytes of padding follow.
PADDING_OF_FIRST_OP = 4 * 8 + 2 * 4 + 4


@dataclass
class Bound:
    """The decode plan of a driver, bound to kernels that count their calls."""

    plan: driver.Plan
    step: abi.StepInputs = field(default_factory=abi.StepInputs)
    mark: driver.Mark = field(default_factory=driver.Mark)
    fault: driver.Fault = field(default_factory=driver.Fault)
    rows: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = ctypes.create_string_buffer(self.plan.context_bytes + 64)
        self.address = ctypes.addressof(self.context) + -ctypes.addressof(self.context) % 64
        self._kept: list[object] = []
        self.start()

    def start(self, num_ops: int = 2) -> int:
        data, step, slots = 64, ctypes.pointer(self.step), ctypes.pointer(abi.Slots())
        table = abi.Weight(data=data, stride=tiny.HIDDEN, rows=tiny.VOCAB)
        out = abi.Tensor(data, 0, tiny.HIDDEN, tiny.HIDDEN)
        embed = abi.EmbedArgs(rows=0, step=step, slots=slots, table=table, format=0, out=out)
        sample = abi.SampleArgs(rows=0, step=step, slots=slots, logits=abi.Tensor(data, 0, tiny.VOCAB, tiny.VOCAB))
        ops = (driver.Op * 2)(
            driver.Op(abi.Op.EMBED, ctypes.addressof(embed), 101),
            driver.Op(abi.Op.SAMPLE, ctypes.addressof(sample), 102),
        )
        kernels = abi.Kernels()
        called = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))(self._count)
        for name in ("embed", "sample"):
            pointer = ctypes.cast(called, ctypes.c_void_p).value
            ctypes.c_void_p.from_buffer(kernels, getattr(abi.Kernels, name).offset).value = pointer
        binding = driver.Binding(
            ctypes.addressof(kernels), None, ctypes.pointer(self.mark), ops, num_ops, 0, 1, MAX_ROWS, MAX_SAMPLES
        )
        self._kept = [embed, sample, slots, ops, kernels, called]
        return int(self.plan.start(self.address, binding, self.fault))

    def _count(self, _device: object, args: ctypes._Pointer[ctypes.c_int32]) -> int:
        self.rows.append(args[0])
        return GLM_OK

    def run(self, call: Callable[..., int], rows: int, samples: int) -> int:
        self.rows.clear()
        self.step.num_rows, self.step.num_samples = rows, samples
        self.fault.op, self.fault.what = -1, None
        return int(call(self.address, rows, samples, self.fault))


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """By whether it is a debug build."""
    found = {}
    for debug in (False, True):
        source = Source(tiny.plan("mixed"), tiny.plan("decode"), 0, 1, debug)
        found[debug] = compile_driver(source, toolchain(), tmp_path_factory.mktemp("driver"))
    return found


@pytest.fixture(params=[False, True], ids=["release", "debug"])
def bound(builds: dict[bool, Path], request: pytest.FixtureRequest) -> Iterator[Bound]:
    yield bind(builds[request.param])


def bind(path: Path) -> Bound:
    found = driver.query(path)
    assert found is not None
    return Bound(found.decode)


def test_what_it_says_of_itself(builds: dict[bool, Path]) -> None:
    for debug, path in builds.items():
        found = driver.query(path)
        assert found is not None and driver.query(path, driver.VERSION + 1) is None
        assert (found.version, found.kernels_version, found.debug) == (driver.VERSION, abi.VERSION, int(debug))
        assert found.compiler.decode() == f"terra {toolchain().terra_version}"
        assert (found.mixed.num_ops, found.decode.num_ops) == (3, 2)


@pytest.mark.parametrize("rows", [0, 1, 2, MAX_SAMPLES])
def test_calls_and_marks(bound: Bound, rows: int) -> None:
    bound.mark.calls = 40
    assert bound.run(bound.plan.forward, rows, rows) == GLM_OK and bound.rows == [rows]
    assert (bound.mark.op, bound.mark.calls) == (101, 41)
    assert bound.run(bound.plan.sample, rows, rows) == GLM_OK and bound.rows == [rows]
    assert (bound.mark.op, bound.mark.calls) == (102, 42)
    assert bound.fault.what is None


@pytest.mark.parametrize(
    ("rows", "samples", "what"),
    [
        (-1, 0, b"rows beyond max_rows"),
        (MAX_ROWS + 1, 0, b"rows beyond max_rows"),
        (0, -1, b"samples beyond max_samples"),
        (0, MAX_SAMPLES + 1, b"samples beyond max_samples"),
        (2, 1, b"rows of decode that are not sampled"),
    ],
)
def test_counts_are_checked_by_debug_builds(builds: dict[bool, Path], rows: int, samples: int, what: bytes) -> None:
    release, debug = bind(builds[False]), bind(builds[True])
    assert debug.run(debug.plan.forward, rows, samples) == GLM_INTERNAL
    assert (debug.fault.op, debug.fault.what, debug.rows) == (-1, what, [])
    assert release.run(release.plan.forward, rows, samples) == GLM_OK and release.rows == [rows]


def test_a_step_of_other_counts_is_found_by_debug_builds(builds: dict[bool, Path]) -> None:
    for debug, path in builds.items():
        bound = bind(path)
        bound.step.num_rows = 2
        status = int(bound.plan.forward(bound.address, 1, 1, bound.fault))
        assert status == (GLM_INTERNAL if debug else GLM_OK)
        if debug:
            assert (bound.fault.op, bound.fault.what) == (0, b"the step has another number of rows")


def test_arguments_that_change_are_found_by_debug_builds(builds: dict[bool, Path]) -> None:
    for debug, path in builds.items():
        bound = bind(path)
        ctypes.c_uint8.from_address(bound.address + PADDING_OF_FIRST_OP).value ^= 1
        assert bound.run(bound.plan.forward, 1, 1) == (GLM_INTERNAL if debug else GLM_OK)
        if debug:
            assert (bound.fault.op, bound.fault.what) == (0, b"its arguments have changed since start")


def test_a_debug_build_does_not_run_unless_started(builds: dict[bool, Path]) -> None:
    bound = bind(builds[True])
    bound.plan.stop(bound.address)
    assert bound.run(bound.plan.forward, 1, 1) == GLM_INTERNAL
    assert bound.fault.what == b"it has not been started"
    assert bound.start(num_ops=1) == GLM_INVALID_ARGUMENT and bound.fault.what == b"the number of ops"
    assert bound.run(bound.plan.forward, 1, 1) == GLM_INTERNAL
    assert bound.start() == GLM_OK and bound.run(bound.plan.forward, 1, 1) == GLM_OK
