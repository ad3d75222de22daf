"""Log-probabilities as completions have them: four lists, an entry for each token."""

from __future__ import annotations

from typing import Any

from glmserve.inference.v1 import inference_pb2
from router.http.openai_parts import token_text

_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """Those of one choice; it counts where in the text each token begins."""

    def __init__(self) -> None:
        self._offset = 0
        self._all: dict[str, list[Any]] = {name: [] for name in _LISTS}

    @property
    def json(self) -> dict[str, list[Any]]:
        """Everything so far."""
        return self._all

    def add(self, response: inference_pb2.GenerateResponse) -> dict[str, list[Any]]:
        """Take a message. Returns what is new."""
        new: dict[str, list[Any]] = {name: [] for name in _LISTS}
        for index, entry in enumerate(response.prompt_logprobs):
            self._append(new, entry, predicted=index > 0)
        for entry in response.logprobs:
            self._append(new, entry, predicted=True)
        for name in _LISTS:
            self._all[name] += new[name]
        return new

    def _append(self, new: dict[str, list[Any]], entry: inference_pb2.TokenLogprob, *, predicted: bool) -> None:
        text = token_text(entry.token)
        top = {token_text(top.token): top.logprob for top in entry.top}
        new["tokens"].append(text)
        new["token_logprobs"].append(entry.logprob if predicted else None)
        # The token itself is among them, be it a likely one or not.
        new["top_logprobs"].append(top | {text: entry.logprob} if predicted else None)
        new["text_offset"].append(self._offset)
        self._offset += len(entry.token.decode(errors="ignore"))
