"""A rank that fails or hangs in the middle of a step ends the worker, and says which, where and when.

The worker is a real one, of four ranks; its kernel table is the one of tests/native that fails and hangs on demand.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest

from engine_worker.runtime.abi import LIBRARY_DIR
from glmserve.engine.v1 import engine_pb2, engine_pb2_grpc
from tests.chaos.processes import Service, services, wait_health
from tests.golden.cases import DATA
from tests.native.fault_table import PATH, Op
from tests.unit.worker_harness import Stream, submit

LIMIT_S = 10.0  # from the fault to the end of the process


def faulty_worker(tmp_path: Path, fault: str) -> Service:
    libraries = tmp_path / "lib"
    libraries.mkdir()
    (libraries / "libglm_runtime.so").symlink_to(LIBRARY_DIR / "libglm_runtime.so")
    (libraries / "libglm_kernels_cpu.so").symlink_to(PATH)
    args = ["--model", str(DATA / "f32_8_kv_heads"), "--tp", "4", "--device", "cpu", "--kv-memory-mb", "16"]
    environment = {"GLM_LIBRARY_DIR": str(libraries), "GLM_FAULT": fault}
    return Service("engine_worker", tmp_path, *args, "--stall-seconds", "1", environment=environment)


@pytest.mark.parametrize(
    ("what", "op", "report"),
    [
        ("fail", Op.LINEAR, r"rank 2: op linear layers\.\d\.\S+ of kernel table fault returned .* in step \d+$"),
        ("fail", Op.RMS_NORM, r"rank 2: op rms_norm layers\.\d\.\w+\.norm of kernel table fault .* in step \d+$"),
        (
            "hang",
            Op.LINEAR,
            r"no rank has ended an operation for 1 s .*: rank 2 in op linear \S+ of step \d+; rank 0 in op",
        ),
    ],
    ids=["fails", "fails in an exchange", "hangs"],
)
async def test_the_worker_ends_with_a_report(tmp_path: Path, what: str, op: Op, report: str) -> None:
    worker = faulty_worker(tmp_path, f"{what} {op.value} 2 400")
    with services(worker):
        worker.start()
        await wait_health(worker.address, True)
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stream = Stream(engine_pb2_grpc.EngineServiceStub(channel).Serve())
            await stream.send(submit(1, [1, 2, 3], 200), credit=10_000)
            end = await asyncio.wait_for(stream.end_of(1), LIMIT_S)
        assert await asyncio.to_thread(worker.process.wait, LIMIT_S) == 1
    assert end.finish is not None and end.finish.reason == engine_pb2.FINISH_REASON_UNAVAILABLE
    assert 0 < end.finish.usage.completion_tokens == len(end.token_ids) < 200
    assert re.search(report, worker.last_words), worker.last_words
