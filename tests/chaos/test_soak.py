"""After a thousand short requests with random cancels nothing is kept of any."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from tests.chaos.soak import check, soak


@pytest.mark.timeout(600)
async def test_nothing_is_kept_of_a_thousand_requests(tmp_path: Path) -> None:
    check(await soak(resolve_model(DEFAULT_MODEL), tmp_path, requests=250, rounds=4), growth_mb=5)
