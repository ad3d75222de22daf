"""What a load adds up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.load.client import Sample

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count as goodput. Milliseconds; of the time per output token, its mean."""

    ttft_ms: float
    tpot_ms: float

    def holds(self, sample: Sample) -> bool:
        """Whether a request was answered in time. One that brought a single token has no time per token to miss."""
        ttft, tpot = sample.ttft_s, sample.seconds_per_token
        return (
            sample.status == "OK"
            and ttft is not None
            and ttft * 1000 <= self.ttft_ms
            and (tpot is None or tpot * 1000 <= self.tpot_ms)
        )


def summarise(samples: Sequence[Sample], slo: Slo) -> dict[str, Any]:
    """Figures over the whole run, ramp and tail included: from the first due request to the last end.

    Times are in milliseconds. TTFT and latency are of requests that were answered; `inter_token_ms` has one value for
    each message after a request's first: tokens that arrived merged count as one.
    """
    done = [sample for sample in samples if sample.status == "OK"]
    refused = [sample for sample in samples if sample.status == "RESOURCE_EXHAUSTED"]
    good = [sample for sample in done if slo.holds(sample)]
    seconds = max((sample.end_s for sample in samples), default=0.0)
    seconds -= min((sample.due_s for sample in samples), default=0.0)
    return {
        "seconds": round(seconds, 3),
        "requests": len(samples),
        "by_status": dict(Counter(sample.status for sample in samples)),
        "requests_per_s": _rate(len(done), seconds),
        "input_tokens_per_s": _rate(sum(sample.prompt_tokens for sample in done), seconds),
        "output_tokens_per_s": _rate(sum(sample.output_tokens for sample in samples), seconds),
        "ttft_ms": distribution(sample.ttft_s for sample in done),
        "inter_token_ms": distribution(gap for sample in done for gap in sample.gaps_s),
        "time_per_output_token_ms": distribution(sample.seconds_per_token for sample in done),
        "latency_ms": distribution(sample.total_s for sample in done),
        "refusal_ms": distribution(sample.end_s - sample.sent_s for sample in refused),
        "goodput": {
            "slo_ttft_ms": slo.ttft_ms,
            "slo_tpot_ms": slo.tpot_ms,
            "requests_per_s": _rate(len(good), seconds),
            "output_tokens_per_s": _rate(sum(sample.output_tokens for sample in good), seconds),
            "share": round(len(good) / len(samples), 4) if samples else 0.0,
        },
        "client_lag_ms": distribution(sample.sent_s - sample.due_s for sample in samples),
    }


def distribution(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, percentiles and maximum in milliseconds; None of nothing."""
    values = sorted(value * 1000 for value in seconds if value is not None)
    if not values:
        return None
    figures = {f"p{percent}": round(percentile(values, percent), 3) for percent in PERCENTILES}
    return {"mean": round(sum(values) / len(values), 3), **figures, "max": round(values[-1], 3)}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, linear between the two nearest ranks."""
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
