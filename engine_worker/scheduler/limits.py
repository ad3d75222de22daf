"""What the scheduler may hand out."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the engine, and the policy's few numbers."""

    num_pages: int
    page_size: int
    max_context: int
    max_running: int
    max_step_tokens: int  # more than max_running, so that a step of decodes leaves room for prefill
    prefix_cache: bool = True
    aging_s: float = 30.0

    def refuse_impossible(self, prompt_len: int, max_tokens: int) -> None:
        """Raises InvalidRequestError for a request that could never run to its end."""
        length = prompt_len + max_tokens
        need = f"prompt ({prompt_len}) and max_tokens ({max_tokens}) need"
        if length > self.max_context:
            raise InvalidRequestError(f"{need} a context of {length} tokens, at most {self.max_context} is allowed")
        # The last token is never computed, so it needs no place.
        pages = -(-(length - 1) // self.page_size)
        if pages > self.num_pages:
            raise InvalidRequestError(
                f"{need} {pages} KV pages, at most {self.num_pages} are allowed: the pool has no more"
            )
