"""Pictures of a load. matplotlib is no dependency of the services: it comes with the dev extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.errors import DeployError
from deploy.load.client import Sample


class PlotsError(DeployError):
    """Pictures cannot be drawn. The text says what to install."""

    exit_code = 2


def require_matplotlib() -> Any:
    """The module, set up to draw into files. Raises PlotsError: it is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415
    except ImportError:
        raise PlotsError("--plots needs matplotlib: pip install 'glmserve[plots]'") from None
    mpl.use("Agg")
    return mpl


def draw(samples: Sequence[Sample], directory: Path) -> list[Path]:
    """Write distributions of the latencies, and what happened over time, as PNG files; their paths."""
    require_matplotlib()
    from matplotlib import pyplot as plt  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    done = [sample for sample in samples if sample.status == "OK"]
    latencies, over_time = directory / "latencies.png", directory / "timeline.png"

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    _cumulative(left, [sample.ttft_s for sample in done], "time to first token, ms")
    _cumulative(right, [gap for sample in done for gap in sample.gaps_s], "inter-token latency, ms")
    figure.tight_layout()
    figure.savefig(latencies, dpi=120)
    plt.close(figure)

    figure, axes = plt.subplots(figsize=(10, 4))
    axes.scatter([s.due_s for s in done], [s.total_s for s in done], s=6, label="answered: latency")
    others = [s for s in samples if s.status != "OK"]
    axes.scatter([s.due_s for s in others], [s.total_s for s in others], s=6, c="red", label="refused or failed")
    axes.set(xlabel="arrival, s", ylabel="s", title=f"{len(done)} answered, {len(others)} not")
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(over_time, dpi=120)
    plt.close(figure)
    return [latencies, over_time]


def _cumulative(axes: Any, seconds: Sequence[float | None], label: str) -> None:
    values = sorted(value * 1000 for value in seconds if value is not None)
    shares = [(rank + 1) / len(values) for rank in range(len(values))]
    axes.plot(values, shares)
    axes.set(xlabel=label, ylabel="share of values", ylim=(0, 1.02))
    axes.grid(visible=True, alpha=0.3)
