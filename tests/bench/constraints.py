"""What constraints add to a decode step at batch 16: `python -m tests.bench.constraints`.

Runs with and without take turns on the embedded model; the schema lets no text end. Of each kind the best round counts.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from engine_worker.constraints.compiler import ConstraintCompiler
from engine_worker.constraints.matcher import RequestConstraint
from glmserve.engine.v1 import engine_pb2
from tests.bench.engine import Arrival, loaded

BATCH, TOKENS, ROUNDS = 16, 32, 4
PROMPT = [504, 3575, 282, 4649, 314]
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "sizes": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["name", "sizes"],
        "additionalProperties": False,
    },
}


def step_seconds(arrivals: list[Arrival]) -> float:
    """Median time between the tokens of full batches."""
    full = [arrival.at for arrival in arrivals if arrival.tokens == BATCH]
    return statistics.median(after - before for before, after in pairwise(full))


def main() -> None:
    """Print both, and the difference."""
    with loaded(resolve_model(DEFAULT_MODEL)) as (bench, _):
        compiler = ConstraintCompiler(resolve_model(DEFAULT_MODEL), bench.info.vocab, bench.model.config.eos_token_ids)
        prompts = [[*PROMPT, 40 + i] for i in range(BATCH)]
        best = {"without": float("inf"), "with": float("inf")}
        for _ in range(ROUNDS):
            for kind, so_far in best.items():
                constraints = [_compile(compiler) for _ in prompts] if kind == "with" else []
                _, arrivals, _ = bench.run(prompts, TOKENS, constraints)
                best[kind] = min(so_far, step_seconds(arrivals))
    added = best["with"] / best["without"] - 1
    print(f"step without constraints {best['without'] * 1e3:.1f} ms, with {best['with'] * 1e3:.1f} ms: {added:+.1%}")


def _compile(compiler: ConstraintCompiler) -> RequestConstraint:
    return compiler.compile(engine_pb2.Constraint(json_schema=json.dumps(SCHEMA)), 0, []).result()


if __name__ == "__main__":
    main()
