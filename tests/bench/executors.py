"""What a step costs besides its kernels, by each executor: `python -m tests.bench.executors [--table null|cpu|cuda]`.

A plan of 92 layers, GLM-4.7's own but for narrower matrices, one token a step. With `null` the operations do nothing,
so that a step is what the executor takes; with `cuda` steps run without graphs, so that it is what the host takes to
launch them. Terra is needed once: `--prepare DIRECTORY` compiles the drivers, `--drivers DIRECTORY` uses them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_worker.models import Model, build_model
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine, kernel_table_path
from engine_worker.runtime.ranks import rank_options

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("data") / "glm-4.7-fp8.config.json"
NARROWER = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "n_routed_experts": 8,
    "vocab_size": 1024,
    "eos_token_id": [3],
}
BUILDS = {"terra": False, "terra-debug": True}
ROUNDS = 5


def load(directory: Path, layers: int) -> Model:
    """Its config is written into `directory`."""
    config = json.loads(CONFIG.read_text()) | NARROWER | {"num_hidden_layers": layers}
    (directory / "config.json").write_text(json.dumps(config))
    return build_model(directory, synthetic_seed=0)


def prepare(model: Model, directory: Path) -> None:
    """Compile the drivers into `directory`, and say how long that takes."""
    from engine_worker.driver.compile import Source, compile_driver  # noqa: PLC0415 - not on a bare machine
    from engine_worker.driver.toolchain import find_toolchain  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    toolchain, (rank,) = find_toolchain(), rank_options(model)
    for name, debug in BUILDS.items():
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as scratch:
            made = compile_driver(Source(rank.mixed_plan, rank.decode_plan, 0, 1, debug), toolchain, Path(scratch))
            (directory / f"{name}.so").write_bytes(made.read_bytes())
        print(f"{name:<12} compiled in {time.perf_counter() - begin:.1f} s by terra {toolchain.terra_version}")


def null_table(directory: Path) -> Path:
    """Compile tests/bench/null_table.cpp."""
    source, out = Path(__file__).with_name("null_table.cpp"), directory / "libglm_kernels_null.so"
    flags = ["-shared", "-fPIC", "-O2", "-std=c++20", f'-DCPU_TABLE="{kernel_table_path("cpu")}"']
    subprocess.run(
        ["c++", *flags, f"-I{ROOT / 'kernels' / 'include'}", str(source), "-ldl", "-o", str(out)], check=True
    )
    return out


def measure(model: Model, table: str, kernels: Path, drivers: Path, steps: int) -> None:
    """The fastest step of each executor, in turns."""
    shape = StepShape(1, 16, decode=table != "cuda")  # decode steps of a table with graphs are replayed
    num_ops = len(shape.plan(model).ops)
    fastest: dict[str, float] = {}
    for _ in range(ROUNDS):
        for executor in ("native", *BUILDS):
            driver = None if executor == "native" else drivers / f"{executor}.so"
            options = options_for(model, table, [shape])
            ranks = [replace(rank, driver=driver) for rank in options.ranks]
            with Engine.create(replace(options, kernels_path=kernels, ranks=ranks, num_threads=1)) as engine:
                seconds = time_steps(engine, shape, steps).fastest_s
            fastest[executor] = min(fastest.get(executor, seconds), seconds)
    for executor, seconds in fastest.items():
        print(
            f"{table} {executor:<12} {num_ops} ops, step {seconds * 1e6:.1f} us, {seconds * 1e6 / num_ops:.4f} us an op"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=("null", "cpu", "cuda"), default="null")
    parser.add_argument("--layers", type=int, default=92)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prepare", type=Path, metavar="DIRECTORY", help="compile the drivers, and no more")
    parser.add_argument(
        "--drivers", type=Path, metavar="DIRECTORY", help="that were prepared; without, they are compiled"
    )
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = load(scratch, asked.layers)
        drivers = asked.prepare or asked.drivers or scratch
        if asked.drivers is None:
            prepare(model, drivers)
        if asked.prepare is None:
            kernels = null_table(scratch) if asked.table == "null" else kernel_table_path(asked.table)
            measure(model, asked.table, kernels, drivers, asked.steps)


if __name__ == "__main__":
    main()
