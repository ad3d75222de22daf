"""What gzip costs and saves on the messages of the public API: `python -m tests.bench.compression`."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from glmserve.inference.v1 import inference_pb2

_GZIP = 31
_TRIALS = 7
_TRIAL_S = 0.02
_VOCAB = 150_000


def samples() -> dict[str, bytes]:
    """Serialised messages by what they are."""
    source = random.Random(0)
    text = "".join(path.read_text() for path in sorted(Path(__file__).parents[2].glob("*/README.md")))
    request_id = f"{source.getrandbits(128):032x}"
    token = inference_pb2.GenerateResponse(request_id=request_id, text=" Paris", token_ids=[9000])
    logprobs = inference_pb2.GenerateResponse(request_id=request_id)
    for _ in range(8):
        entry = logprobs.logprobs.add(token_id=source.randrange(_VOCAB), logprob=-source.random())
        for _ in range(20):
            entry.top.add(token_id=source.randrange(_VOCAB), logprob=-10 * source.random())
    prompt = inference_pb2.GenerateRequest(prompt=text[:20_000])
    ids = inference_pb2.GenerateRequest()
    ids.prompt_ids.ids.extend(source.randrange(_VOCAB) for _ in range(5000))
    return {
        "a streamed token": token.SerializeToString(),
        "8 tokens, 20 logprobs each": logprobs.SerializeToString(),
        "a prompt of 20 kB of text": prompt.SerializeToString(),
        "a prompt of 5000 ids": ids.SerializeToString(),
    }


def pack(data: bytes) -> bytes:
    """gzip at zlib's default level, as gRPC does."""
    compressor = zlib.compressobj(-1, zlib.DEFLATED, _GZIP)
    return compressor.compress(data) + compressor.flush()


def best_us(work: Callable[[], object]) -> float:
    """Time of one call, the best of several trials."""
    best = float("inf")
    for _ in range(_TRIALS):
        calls, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < _TRIAL_S:
            work()
            calls += 1
        best = min(best, elapsed / calls)
    return best * 1e6


def main() -> None:
    print(f"{'message':28}{'bytes':>8}{'gzip':>8}{'pack us':>10}{'unpack us':>11}")
    for name, data in samples().items():
        packed = pack(data)
        pack_us, unpack_us = best_us(partial(pack, data)), best_us(partial(zlib.decompress, packed, _GZIP))
        print(f"{name:28}{len(data):8}{len(packed):8}{pack_us:10.1f}{unpack_us:11.1f}")


if __name__ == "__main__":
    main()
