"""How long work takes at a pace that was measured: what both services price refusals with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """A worker's speed when it is well filled. 0: not measured yet; what depends on it then takes no time."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    tokens_per_request: float = 0.0

    def prefill_s(self, tokens: int) -> float:
        """To compute prompts of `tokens` together."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s else 0.0

    def places_s(self, count: int) -> float:
        """Until `count` of the running requests have ended."""
        return max(0, count) * self.tokens_per_request / self.decode_tokens_per_s if self.decode_tokens_per_s else 0.0

    def decode_s(self, tokens: int, running: int) -> float:
        """For one of `running` requests to generate `tokens`."""
        return tokens * max(1, running) / self.decode_tokens_per_s if self.decode_tokens_per_s else 0.0

    def queue_s(self, *, free_places: int, waiting_requests: int, waiting_prompt_tokens: int) -> float:
        """Until a request that arrives now starts: prompts before it are computed, and a place is free.

        The longer of the two, because the decoding rate is measured with the prompts that are computed meanwhile.
        """
        return max(self.prefill_s(waiting_prompt_tokens), self.places_s(waiting_requests + 1 - free_places))


UNKNOWN = Pace()
