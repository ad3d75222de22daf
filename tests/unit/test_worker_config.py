"""Sizes that follow from settings, model and machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_worker import config as config_module
from engine_worker.backlog import Backlog
from engine_worker.config import Sizes, WorkerConfig, plan_sizes
from engine_worker.errors import ConfigError, UnsupportedError
from engine_worker.memory import available_memory_bytes
from engine_worker.plan.record import KvCache

KV = KvCache(layers=2, kv_heads=4, head_dim=64, dtype="bf16")
PAGE_BYTES = 16 * 2 * 2 * 4 * 64 * 2


def sizes(model_context: int = 8192, kv: KvCache = KV, **values: Any) -> Sizes:
    return plan_sizes(WorkerConfig(model=Path("x"), **values), model_context, kv)


@pytest.mark.parametrize(
    ("model_context", "setting", "expected"),
    [(8192, None, 4096), (4096, None, 4096), (1000, None, 992), (8192, 8192, 8192), (8192, 16, 16)],
)
def test_context_is_the_settings_or_4096_or_the_models(model_context: int, setting: int | None, expected: int) -> None:
    assert sizes(model_context, max_context=setting, kv_memory_mb=1).max_context == expected


def test_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_context: 4096, the model's own is 2048"):
        sizes(2048, max_context=4096)


@pytest.mark.parametrize(("dtype", "factor"), [("fp8", 1), ("bf16", 2), ("f32", 4)])
def test_kv_memory_buys_whole_pages(dtype: Any, factor: int) -> None:
    kv = KvCache(KV.layers, KV.kv_heads, KV.head_dim, dtype)
    assert sizes(kv=kv, kv_memory_mb=3).num_pages == 3 * 2**20 * 2 // (PAGE_BYTES * factor)


def test_default_pages_are_what_all_running_requests_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "available_memory_bytes", lambda: 2**40)
    assert sizes(max_context=160, max_running=3, step_tokens=8).num_pages == 30


def test_default_pages_leave_most_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "available_memory_bytes", lambda: 100 * PAGE_BYTES)
    assert sizes().num_pages == 25


def test_memory_for_no_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "available_memory_bytes", lambda: PAGE_BYTES)
    with pytest.raises(ConfigError, match=f"kv_memory_mb: too little for one KV page of {PAGE_BYTES} bytes"):
        sizes()


def machine(tmp_path: Path, *, limit: str | None = None, used: int = 0, inactive: int = 0) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 2000 kB\nMemAvailable: 1000 kB\n")
    if limit is not None:
        (cgroup / "memory.max").write_text(f"{limit}\n")
        (cgroup / "memory.current").write_text(f"{used}\n")
        (cgroup / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    return proc, cgroup


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "expected"),
    [
        (None, 0, 0, 1_024_000),
        ("max", 0, 0, 1_024_000),
        ("500000", 200_000, 50_000, 350_000),
        ("500000", 600_000, 0, 0),
        ("9000000000", 0, 0, 1_024_000),
    ],
)
def test_available_memory(tmp_path: Path, limit: str | None, used: int, inactive: int, expected: int) -> None:
    assert available_memory_bytes(*machine(tmp_path, limit=limit, used=used, inactive=inactive)) == expected


def test_a_machine_that_does_not_tell_its_memory_needs_the_setting(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="set kv_memory_mb"):
        available_memory_bytes(tmp_path / "none", tmp_path)


def test_backlog_bounds_requests_and_tokens() -> None:
    backlog = Backlog(2, 10)
    assert backlog.refusal(1000) is None, "an empty backlog has room for any one request"
    backlog.add((1, 1), 6, 0.0)
    assert backlog.refusal(4) is None
    assert backlog.refusal(5) == "6 prompt tokens wait, with 5 more they would exceed 10"
    backlog.add((1, 2), 1, 0.0)
    assert backlog.refusal(1) == "2 requests wait, at most 2 may"
    backlog.discard((1, 2))
    backlog.discard((1, 2))
    assert (len(backlog), backlog.prompt_tokens) == (1, 6)


def test_retry_delay_follows_the_waits() -> None:
    backlog = Backlog(10, 10)
    assert backlog.retry_after_ms(0.0) == 100
    for number in range(50):
        backlog.add((1, number), 1, 0.0)
        backlog.started((1, number), 2.0)
    assert 1900 <= backlog.retry_after_ms(0.0) <= 2000
    for number in range(50):
        backlog.add((1, number), 1, 0.0)
        backlog.started((1, number), 1e6)
    assert backlog.retry_after_ms(0.0) == 30_000
    assert len(backlog) == 0


def test_retry_delay_is_the_estimate_where_there_is_one() -> None:
    backlog = Backlog(10, 10)
    assert backlog.retry_after_ms(7.5) == 7500
    assert backlog.retry_after_ms(1e6) == 30_000
