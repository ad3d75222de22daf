"""Which exchange of tokens and experts the worker's plans use: as it is set, or as it is measured before loading.

What is measured is the model's own shape with made-up weights, cut to a few layers, in steps as large as they may be.
The choice holds for every step, whatever is in it: a row's numbers do not depend on its company. Workers of one cluster
should choose alike, or none can continue another's requests: what differs by no more than noise is no reason to choose.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import structlog

from engine_worker.config import WorkerConfig
from engine_worker.errors import UnsupportedError
from engine_worker.models import Parallelism, build_model
from engine_worker.models.exchange import Exchange, Exchanges
from engine_worker.profile.shape import StepShape, options_for
from engine_worker.profile.steps import time_steps
from engine_worker.runtime.abi import Engine

log = structlog.get_logger()

_LAYERS_WITH_EXPERTS = 2
_STEPS = {"cpu": 7, "cuda": 30}  # a GPU's clock takes some steps to rise
_GAIN = 0.97  # of replicate's time, that all_to_all has to stay below
_CONTEXT = 256


def choose_exchanges(config: WorkerConfig, table: str) -> Exchanges:
    """Raises WorkerError if what is to be measured cannot run."""
    wanted = {"mixed": config.expert_exchange_prefill, "decode": config.expert_exchange_decode}
    if "auto" not in wanted.values():
        return Exchanges(**{plan: _set(value) for plan, value in wanted.items()})
    seconds = _measure(config, table)
    chosen = {plan: _faster(seconds, plan) if value == "auto" else _set(value) for plan, value in wanted.items()}
    log.info("expert_exchange", **chosen, **{f"{e}_{plan}_ms": 1e3 * s for (e, plan), s in seconds.items()})
    return Exchanges(**chosen)


def _set(value: Literal["replicate", "all_to_all", "auto"]) -> Exchange:
    assert value != "auto"
    return value


def _faster(seconds: dict[tuple[Exchange, str], float], plan: str) -> Exchange:
    measured = {exchange: time for (exchange, of), time in seconds.items() if of == plan}
    if len(measured) < 2 or measured["all_to_all"] >= _GAIN * measured["replicate"]:
        return "replicate"
    return "all_to_all"


def _measure(config: WorkerConfig, table: str) -> dict[tuple[Exchange, str], float]:
    """The fastest step of each plan with each exchange; nothing where there is no choice."""
    shapes = {
        "decode": StepShape(config.max_running, _CONTEXT),
        "mixed": StepShape(1, config.step_tokens, config.step_tokens, decode=False),
    }
    plain = Parallelism(config.tp, config.ep)
    found: dict[tuple[Exchange, str], float] = {}
    with tempfile.TemporaryDirectory() as name:
        if not _write_short_config(config.model, Path(name), longest=max(s.context for s in shapes.values())):
            return {}
        layout = build_model(Path(name), config.kv_dtype, plain, synthetic_seed=0).ranks[0].layout
        if layout.tp == 1 or layout.ep != layout.tp or config.rank_slice is not None:
            return {}
        exchanges: tuple[Exchange, ...] = ("replicate", "all_to_all")
        for exchange in exchanges:
            model = build_model(Path(name), config.kv_dtype, plain, 0, Exchanges(exchange, exchange))
            options = options_for(model, table, list(shapes.values()), device_ordinal=config.gpu)
            try:
                with Engine.create(replace(options, num_threads=config.threads)) as engine:
                    for plan, shape in shapes.items():
                        found[exchange, plan] = time_steps(engine, shape, _STEPS[table]).fastest_s
            except UnsupportedError as error:
                log.info("expert_exchange_not_measured", exchange=exchange, reason=str(error))
    return found


def _write_short_config(model: Path, directory: Path, longest: int) -> bool:
    """The model's, with few layers and room for the steps; False if none of its layers has experts."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    first = config.get("first_k_dense_replace", 0)
    if config["num_hidden_layers"] <= first:
        return False
    dense = min(first, 1)
    config["num_hidden_layers"] = min(config["num_hidden_layers"] - first, _LAYERS_WITH_EXPERTS) + dense
    if dense:
        config["first_k_dense_replace"] = dense
    config["max_position_embeddings"] = max(config["max_position_embeddings"], longest)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return True
