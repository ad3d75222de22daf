"""The table under test against the CPU's, op by op: `GLM_TEST_TABLE=cuda python -m tests.golden.parity_check`.

On all golden checkpoints, on the models in DIR (whose weights are made up where only config.json is there), and on a
rank of GLM-4.7-FP8 with four layers. Says of each kind of op the largest error. Needs NumPy and the shared objects.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine_worker.models import KvDtypeSetting, Model, Parallelism, build_model
from engine_worker.parity.lockstep import OpError, ParityError
from engine_worker.parity.run import Table, random_prompts, run_parity, worst_of_each_kind
from engine_worker.runtime.abi import kernel_table_path
from engine_worker.weights.safetensors_index import INDEX_NAME, SINGLE_NAME
from tests.bench.rank_slice import load as load_glm
from tests.golden.cases import CASES
from tests.golden.table import TABLE

PROMPTS, PROMPT_TOKENS, DECODES = 3, 40, 4


def check(name: str, model: Model) -> bool:
    """Whether the tables agree."""
    prompts = random_prompts(PROMPTS, PROMPT_TOKENS, model.config.vocab_size)
    found: list[OpError] = []
    try:
        found.extend(
            run_parity(model, Table(kernel_table_path("cpu")), Table(kernel_table_path(TABLE)), prompts, DECODES)
        )
    except ParityError as error:
        print(f"{name:32} {error}", flush=True)
        return False
    worst = ", ".join(f"{each.kind} {each.difference.error:.1g}" for each in worst_of_each_kind(found))
    print(f"{name:32} {len(found)} outputs agree; largest errors: {worst}", flush=True)
    return True


def load(directory: Path, kv_dtype: KvDtypeSetting = "auto") -> Model:
    has_weights = any((directory / name).exists() for name in (INDEX_NAME, SINGLE_NAME))
    return build_model(directory, kv_dtype, synthetic_seed=None if has_weights else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="*", metavar="DIR")
    arguments = parser.parse_args()
    if TABLE == "cpu":
        parser.error("GLM_TEST_TABLE is cpu, or not set: name the table to compare with the CPU's")
    models = [(case.name, case.directory) for case in CASES]
    models += [(directory.name, directory) for directory in arguments.directories]
    agree = [check(f"{name} {kv}", load(path, kv)) for name, path in models for kv in ("auto", "fp8")]
    glm = load_glm(4, "bf16", Parallelism(tp=8, ep=8, rank_slice=0))
    agree.append(check("GLM-4.7-FP8, 4 layers, rank 0 of 8", glm))
    sys.exit(0 if all(agree) else 1)


if __name__ == "__main__":
    main()
