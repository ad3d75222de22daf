"""llama.cpp under the driver, in the Python that has it: FILE.gguf THREADS.

Greedy, as cheaply as its users can have it: NumPy's argmax over the logits in place.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np

from tests.bench.peers.protocol import MAX_BATCH, PROMPT, prompts, serve

CONTEXT = 512 + 16
LIMIT = 512


class Llama:
    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = CONTEXT * MAX_BATCH
        params.n_batch = params.n_ubatch = LIMIT
        params.n_seq_max = MAX_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(LIMIT, 0, 1)

    def decode(self, batch: int, steps: int) -> float:
        """Seconds of a step in which `batch` sequences get a token, the mean of `steps`."""
        self._clear()
        tokens = []
        for sequence, prompt in enumerate(prompts(batch, PROMPT, self._vocab)):
            self._compute([(token, i, sequence, i == PROMPT - 1) for i, token in enumerate(prompt)])
            tokens.append(self._best(PROMPT - 1))
        start = time.perf_counter()
        for position in range(PROMPT, PROMPT + steps):
            self._compute([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
            tokens = [self._best(i) for i in range(batch)]
        return (time.perf_counter() - start) / steps

    def prefill(self, tokens: int) -> float:
        """Seconds from a prompt to its first token."""
        self._clear()
        (prompt,) = prompts(1, tokens, self._vocab)
        start = time.perf_counter()
        self._compute([(token, i, 0, i == tokens - 1) for i, token in enumerate(prompt)])
        self._best(tokens - 1)
        return time.perf_counter() - start

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _compute(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama_decode failed")

    def _best(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    start = time.perf_counter()
    llama = Llama(path, threads)
    serve(time.perf_counter() - start, {"decode": llama.decode, "prefill": llama.prefill})


if __name__ == "__main__":
    main()
