"""Every metric that the dashboard and the alert rules name is one that a service really exposes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client.process_collector import ProcessCollector

from engine_worker.expert_loads import ExpertLoads
from engine_worker.runtime.loop import StepStats
from engine_worker.scheduler.request import Finish, Reason, Usage
from engine_worker.telemetry import WorkerTelemetry
from glmserve.engine.v1 import engine_pb2
from router.telemetry import RequestRecord, RouterTelemetry
from tests.unit.telemetry_harness import recorded

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = DEPLOY / "dashboards"
# Prometheus' functions, operators and label matchers are not metrics.
WORDS = {
    *("absent", "and", "by", "histogram_quantile", "max", "rate", "scalar", "sum"),
    *("le", "phase", "reason", "state", "status", "type", "instance", "among", "group"),
}


def exposed() -> set[str]:
    """The names that both services' endpoints show once everything has happened."""
    with recorded() as seen:
        ProcessCollector(registry=seen.registry)
        router = RouterTelemetry(seen.telemetry)
        router.observe(lambda: 1)
        ok = RequestRecord("Chat", "r", "OK", None, "stop", 3, 1, 5, 0.1, 0.2, 1.0)
        refused = RequestRecord("Generate", "r", "RESOURCE_EXHAUSTED", "queue", None, 0, 0, 0, None, None, 0.1)
        for record in (ok, refused):
            router.end(record, router.begin(record.method, "grpc", ""))
        worker = WorkerTelemetry(seen.telemetry, each_expert=True)
        worker.observe(engine_pb2.Load)
        counts = np.ones((1, 2), np.uint64)
        loads = ExpertLoads(layers=(3,), experts=counts, groups=counts, recent_experts=[1.0], recent_groups=[1.0])
        worker.observe_experts(lambda: loads)
        worker.stepped([StepStats(2, 1, 0.01, 0.02)])
        worker.rejected(engine_pb2.Rejection(reason=engine_pb2.REJECTION_REASON_OVERLOADED))
        worker.accepted((1, 1), engine_pb2.Submit())
        worker.finished(Finish((1, 1), Reason.LENGTH, None, Usage(3, 1, 5, 0, 0.1, 0.2, 1.0), 7))
        return seen.names()


def grafana() -> list[str]:
    panels = json.loads((DASHBOARDS / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alerts() -> list[str]:
    return re.findall(r"^ +expr: (.+)$", (DASHBOARDS / "alerts.yaml").read_text(), re.MULTILINE)


def metrics(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\"[^\"]*\"", "", expression)
    return set(re.findall(r"\b[a-z][a-z0-9_]*\b", bare)) - WORDS


@pytest.mark.parametrize(("source", "least"), [(grafana, 25), (alerts, 10)])
def test_every_metric_named_exists(source: object, least: int) -> None:
    assert callable(source)
    expressions = source()
    assert len(expressions) >= least
    names = exposed()
    for expression in expressions:
        found = metrics(expression)
        assert found, f"no metric in {expression}"
        assert found <= names, f"{sorted(found - names)} in {expression}"


def test_the_autoscaler_follows_what_its_comment_makes_of_a_metric() -> None:
    text = (DEPLOY / "kubernetes" / "base" / "router-scaling.yaml").read_text()
    followed = yaml.safe_load(text)["spec"]["metrics"][0]["external"]["metric"]["name"]
    (query,) = re.findall(r"metricsQuery: '(.*)'", text)
    assert f"name: {{as: {followed}}}" in text
    assert metrics(query) == {"glm_worker_queue_duration_seconds_bucket"}
    assert metrics(query) <= exposed()


def test_a_metric_that_does_not_exist_is_found() -> None:
    assert metrics('sum by (le) (rate(glm_worker_nothing_bucket{phase="x"}[5m])) > 0.5') == {
        "glm_worker_nothing_bucket"
    }


def test_the_readme_explains_every_metric_of_ours() -> None:
    text = (DASHBOARDS / "README.md").read_text()
    for group, members in re.findall(r"(glm_worker_)\{([a-z_,]+)\}", text):
        text += "".join(f" {group}{member} {group}{member}_total" for member in members.split(","))
    ours = {
        re.sub(r"_(bucket|count|sum|created)$", "", name) for name in exposed() if "glm_" in name or "gen_ai" in name
    }
    assert {name for name in ours if name not in text} == set()


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DASHBOARDS / "grafana.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
