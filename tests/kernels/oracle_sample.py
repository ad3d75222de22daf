"""NumPy oracle of the sampler: logits change in f32, as in the contract; probabilities and noise are float64."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.kernels import abi
from tests.kernels.harness import F32Array, F64Array

U64 = np.uint64
MASK = U64(0xFFFFFFFF)


def philox(counter: npt.NDArray[np.uint32], key: tuple[int, int]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 of counters [n][4]."""
    x0, x1, x2, x3 = (counter[:, i].astype(U64) for i in range(4))
    k0, k1 = U64(key[0]), U64(key[1])
    for _ in range(10):
        p0, p1 = U64(0xD2511F53) * x0, U64(0xCD9E8D57) * x2
        x0, x1, x2, x3 = (p1 >> U64(32)) ^ x1 ^ k0, p1 & MASK, (p0 >> U64(32)) ^ x3 ^ k1, p0 & MASK
        k0, k1 = (k0 + U64(0x9E3779B9)) & MASK, (k1 + U64(0xBB67AE85)) & MASK
    return np.stack([x0, x1, x2, x3], axis=1).astype(np.uint32)


def gumbel(seed: int, position: int, vocab: int) -> F64Array:
    """-log(-log(u)) for each token id."""
    counters = np.zeros((-(-vocab // 4), 4), np.uint32)
    counters[:, 0] = np.arange(len(counters))
    counters[:, 1] = position
    words = philox(counters, (seed & 0xFFFFFFFF, seed >> 32)).reshape(-1)[:vocab]
    u = ((words >> 9).astype(np.float64) + 0.5) * 2.0**-23
    return np.asarray(-np.log(-np.log(u)))


def change_logits(logits: F32Array, request: abi.Sampling, counts: npt.NDArray[np.uint16], sampled: int) -> F32Array:
    """Step 1: penalties, bias, masked stop ids."""
    values = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    times = (counts & 0x7FFF).astype(np.float32)
    repetition = np.float32(request.repetition_penalty)
    repeated = np.where(values > 0, values / repetition, values * repetition)
    values = np.where(counts != 0, repeated, values)
    values = values - np.float32(request.frequency_penalty) * times
    values = values - np.where(times > 0, np.float32(request.presence_penalty), np.float32(0))
    for i in range(request.num_bias):
        values[request.bias_ids[i]] += np.float32(request.bias_values[i])
    if sampled < request.min_tokens:
        values[request.stop_ids[: request.num_stop_ids]] = -np.inf
    return np.where(np.isnan(values), -np.inf, values).astype(np.float32)


def order(values: F32Array) -> npt.NDArray[np.intp]:
    """Ids by value descending, then id ascending."""
    return np.argsort(-values.astype(np.float64), kind="stable")


def probabilities(values: F32Array) -> F64Array:
    exact = values.astype(np.float64)
    weights = np.exp(exact - exact.max())
    return np.asarray(weights / weights.sum())


def keep(values: F32Array, request: abi.Sampling) -> npt.NDArray[np.bool_]:
    """Step 2: the tokens that top-k, top-p and min-p leave."""
    ids = order(values)
    if request.top_k > 0:
        ids = ids[: request.top_k]
    p = probabilities(values[ids])
    if request.top_p < 1:
        short = np.cumsum(p) < request.top_p
        ids = ids[: int(short.sum()) + 1]
    if request.min_p > 0:
        p = p[: len(ids)]
        ids = ids[p >= request.min_p * p[0]]
    mask = np.zeros(values.size, bool)
    mask[ids] = True
    return mask


@dataclass
class Drawn:
    token: int
    margin: float  # by how much the best l + g leads the second
    kept: npt.NDArray[np.bool_]


def sample(
    logits: F32Array,
    request: abi.Sampling,
    counts: npt.NDArray[np.uint16],
    position: int,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Drawn:
    """Token at `position`, the position of the token being sampled."""
    values = change_logits(logits, request, counts, position - request.prompt_len)
    if allowed is not None:
        values = np.where(allowed, values, np.float32(-np.inf))
    if np.isneginf(values).all():
        return Drawn(-1, np.inf, np.zeros(values.size, bool))
    if request.temperature == 0:
        return Drawn(int(order(values)[0]), np.inf, np.ones(values.size, bool))
    with np.errstate(over="ignore"):
        values = values / np.float32(request.temperature)
    kept = keep(values, request)
    scores = np.where(kept, values + gumbel(request.seed, position, values.size), -np.inf)
    best = np.sort(scores)[::-1]
    margin = best[0] - best[1] if scores.size > 1 else np.inf
    return Drawn(int(np.argmax(scores)), float(margin), kept)


def log_softmax(logits: F32Array) -> F64Array:
    exact = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    shifted = exact - exact.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
