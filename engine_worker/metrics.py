"""How busy the worker is."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from engine_worker.expert_loads import ExpertLoads
from glmserve.engine.v1 import engine_pb2
from glmserve.service.pace import UNKNOWN, Pace


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The engine's counts after a step; totals are since start.

    `running_prompt_tokens`: of the running requests, what is in no step yet.
    """

    running_requests: int = 0
    running_prompt_tokens: int = 0
    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    pace: Pace = UNKNOWN


def load_message(
    engine: LoadSnapshot,
    *,
    open_requests: int,
    waiting_prompt_tokens: int,
    draining: bool,
    step_age_s: float,
    experts: ExpertLoads | None = None,
) -> engine_pb2.Load:
    """`open_requests`: accepted and not finished; what does not run of them waits. `experts`: none has been read yet.

    `waiting_prompt_tokens`: of those. What runs and is not yet computed is before any new prompt too.
    """
    return engine_pb2.Load(
        running_requests=engine.running_requests,
        waiting_requests=max(0, open_requests - engine.running_requests),
        waiting_prompt_tokens=waiting_prompt_tokens + engine.running_prompt_tokens,
        total_pages=engine.total_pages,
        free_pages=engine.free_pages,
        cached_pages=engine.cached_pages,
        steps=engine.steps,
        generated_tokens=engine.generated_tokens,
        prompt_tokens=engine.prompt_tokens,
        cached_prompt_tokens=engine.cached_prompt_tokens,
        preemptions=engine.preemptions,
        draining=draining,
        prefill_tokens_per_s=engine.pace.prefill_tokens_per_s,
        decode_tokens_per_s=engine.pace.decode_tokens_per_s,
        tokens_per_request=engine.pace.tokens_per_request,
        step_age_ms=min(int(step_age_s * 1000), 2**32 - 1),
        expert_imbalance=0.0 if experts is None else fmean(experts.recent_experts),
        expert_rank_imbalance=0.0 if experts is None else fmean(experts.recent_groups),
    )
