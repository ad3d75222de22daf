"""How `glm top` shows what a Watch has seen."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

from deploy.watch import Subject, Watch

_DASH = "-"


def worker_figures(subject: Subject) -> dict[str, float | bool | None]:
    """What is shown of a worker; rates a second, shares 0 to 1."""
    total, free, cached = (subject.now(f"{name}_pages") for name in ("total", "free", "cached"))
    held = None if total is None else total - (free or 0.0) - (cached or 0.0)
    prompt, hits = subject.rate("prompt_tokens"), subject.rate("cached_prompt_tokens")
    draining = subject.now("draining")
    return {
        "running_requests": subject.now("running_requests"),
        "waiting_requests": subject.now("waiting_requests"),
        "waiting_prompt_tokens": subject.now("waiting_prompt_tokens"),
        "steps_per_s": subject.rate("steps"),
        "generated_tokens_per_s": subject.rate("generated_tokens"),
        "prompt_tokens_per_s": prompt,
        "prefix_hit_share": hits / prompt if prompt and hits is not None else None,
        "kv_held_share": held / total if total and held is not None else None,
        "kv_cached_share": cached / total if total and cached is not None else None,
        "preemptions_per_s": subject.rate("preemptions"),
        "step_age_ms": subject.now("step_age_ms"),
        "expert_rank_imbalance": subject.now("expert_rank_imbalance"),
        "draining": None if draining is None else bool(draining),
    }


def router_figures(subject: Subject) -> dict[str, float | None]:
    """What is shown of a router; means are of requests that ended within the interval."""
    first, per_token = (
        subject.mean("gen_ai_server_time_to_first_token_seconds"),
        subject.mean("gen_ai_server_time_per_output_token_seconds"),
    )
    return {
        "requests_in_flight": subject.now("glm_router_requests_in_flight"),
        "workers_serving": subject.now("glm_router_workers_serving"),
        "requests_per_s": subject.rate("gen_ai_server_request_duration_seconds_count"),
        "refusals_per_s": subject.rate("glm_router_refusals_total"),
        "input_tokens_per_s": subject.rate("glm_router_tokens_total:input"),
        "output_tokens_per_s": subject.rate("glm_router_tokens_total:output"),
        "ttft_ms": None if first is None else first * 1e3,
        "time_per_output_token_ms": None if per_token is None else per_token * 1e3,
    }


def as_object(watch: Watch) -> dict[str, list[dict[str, Any]]]:
    """For scripts: one entry a process; a figure that is not known is null."""
    found: dict[str, list[dict[str, Any]]] = {"routers": [], "workers": []}
    for subject in watch.subjects:
        figures = worker_figures(subject) if subject.kind == "worker" else router_figures(subject)
        entry = {"address": subject.address, "error": None if subject.last is None else subject.last.error, **figures}
        found[f"{subject.kind}s"].append(entry)
    return found


def render(watch: Watch) -> Group:
    """For people."""
    tables = []
    for kind, figures in (("router", router_figures), ("worker", worker_figures)):
        subjects = [subject for subject in watch.subjects if subject.kind == kind]
        if subjects:
            tables.append(_table(kind, [(subject, dict(figures(subject))) for subject in subjects]))
    return Group(*tables)


def _table(kind: str, rows: list[tuple[Subject, dict[str, Any]]]) -> Table:
    """Figures down, processes across: there are more figures than processes."""
    table = Table(title=f"{kind}s", title_justify="left")
    table.add_column("")
    for subject, _ in rows:
        table.add_column(subject.address, justify="right")
    for name in rows[0][1]:
        table.add_row(name.replace("_", " "), *(_cell(subject, name, figures[name]) for subject, figures in rows))
    return table


def _cell(subject: Subject, name: str, value: float | bool | None) -> str:
    if subject.last is not None and subject.last.error is not None:
        return "down"
    if value is None:
        return _DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.1%}" if name.endswith("_share") else f"{value:,.1f}".removesuffix(".0")
