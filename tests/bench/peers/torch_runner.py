"""transformers on torch's CPU under the driver, in a Python that has them: FILE.gguf THREADS.

Weights in f32.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.bench.peers.protocol import PROMPT, prompts, serve


class Transformers:
    def __init__(self, path: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        self._vocab = self._model.config.vocab_size

    def decode(self, batch: int, steps: int) -> float:
        """Seconds of a step in which `batch` sequences get a token, the mean of `steps`."""
        with torch.inference_mode():
            tokens, cache = self._forward(prompts(batch, PROMPT, self._vocab), None)
            start = time.perf_counter()
            for _ in range(steps):
                tokens, cache = self._forward(tokens, cache)
        return (time.perf_counter() - start) / steps

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt to its first token."""
        start = time.perf_counter()
        with torch.inference_mode():
            self._forward(prompts(1, tokens, self._vocab), None)
        return time.perf_counter() - start

    def _forward(self, tokens: list[list[int]], cache: Any) -> tuple[list[list[int]], Any]:
        """The next token of each row, greedy, and the cache."""
        output = self._model(input_ids=torch.tensor(tokens), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1).tolist(), output.past_key_values


def main() -> None:
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    start = time.perf_counter()
    model = Transformers(path, threads)
    serve(time.perf_counter() - start, {"decode": model.decode, "prefill": model.prefill})


if __name__ == "__main__":
    main()
