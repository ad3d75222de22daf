"""`make bench-peers`: this engine and llama.cpp on the same weights and threads, in turns.

Every case is a number of pairs, ours and the peer's one right after the other, each going first in turn, so that what
else the machine does falls on both. llama.cpp has the original model with every matrix as Q8_0, this engine its
conversion to GLM-4.7's shape in FP8: the same function, but with wider heads, replicated experts and a bf16 vocabulary.
So the table gives the ratio of tokens a second raw, per byte that a step reads, and per FLOP.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGUFReader

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from engine_worker.models import Model, build_model
from tests.bench.peers.compare import Comparison, LlamaShape, Work, glm_work
from tests.bench.peers.environment import ROOT, can_import, peer_python, q8_0_file
from tests.bench.peers.plot import draw
from tests.bench.peers.protocol import PROMPT, Peer
from tests.bench.peers.report import Measured, report

OURS = "glmserve"
STEPS = {1: 96, 4: 48, 8: 32, 16: 24}  # measured in a run, by batch
PREFILL = 512


@dataclass(frozen=True)
class Case:
    """tokens: of a step, or of the prompt."""

    name: str
    tokens: int
    request: dict[str, object]


def _cases(names: str) -> list[Case]:
    """All, or those that `names` lists. SystemExit: an unknown one."""
    cases = [Case(f"decode-{n}", n, {"do": "decode", "batch": n, "steps": steps}) for n, steps in STEPS.items()]
    cases.append(Case(f"prefill-{PREFILL}", PREFILL, {"do": "prefill", "tokens": PREFILL}))
    wanted = names.split(",") if names else [case.name for case in cases]
    unknown = set(wanted) - {case.name for case in cases}
    if unknown:
        raise SystemExit(f"--cases: {', '.join(sorted(unknown))}, expected some of {', '.join(c.name for c in cases)}")
    return [case for case in cases if case.name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs a case (default: 5)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--cases", type=str, default="", help="only these, with commas between: decode-1,prefill-512")
    parser.add_argument(
        "--torch-python",
        type=Path,
        default=Path(sys.executable),
        help="has torch, transformers, gguf and accelerate",
    )
    parser.add_argument("--plot", action="store_true", help="draw build/peers/*.png; needs matplotlib")
    arguments = parser.parse_args()
    cases = _cases(arguments.cases)
    python = peer_python()
    gguf = q8_0_file(python)
    checkpoint = resolve_model(DEFAULT_MODEL)
    model, shape = build_model(checkpoint, "auto"), _shape(gguf)
    sizes = [str(arguments.threads)]
    ours = [sys.executable, "-m", "tests.bench.peers.glm_runner", str(checkpoint), *sizes]
    others = {"llama.cpp": ([str(python), "-m", "tests.bench.peers.llama_runner", str(gguf), *sizes], shape)}
    if can_import(arguments.torch_python, "torch, transformers, gguf, accelerate"):
        command = [str(arguments.torch_python), "-m", "tests.bench.peers.torch_runner", str(gguf), *sizes]
        others["transformers"] = (command, replace(shape, weight_bytes=4 * shape.weights, kv_bytes=4))
    for name, (command, its_shape) in others.items():
        found = _measure(name, ours, command, cases, _work(model, its_shape), arguments.pairs)
        report(name, found, arguments.threads)
        if arguments.plot:
            draw(found.cases, name, ROOT / f"{name}.png")


def _measure(
    name: str,
    ours: list[str],
    theirs: list[str],
    cases: list[Case],
    work: dict[str, tuple[Work, Work]],
    pairs: int,
) -> Measured:
    loads = [_load_seconds(name, ours, theirs, turn) for turn in range(pairs)]
    peers = (_start(OURS, ours), _start(name, theirs))
    compared = [_compare(peers, case, work[case.name], pairs) for case in cases]
    memory = [peer.ask(do="memory") for peer in peers]
    for peer in peers:
        peer.close()
    return Measured(compared, loads, memory)


def _start(name: str, command: list[str]) -> Peer:
    return Peer(name, command, ROOT / f"{name}.log")


def _load_seconds(name: str, ours: list[str], theirs: list[str], turn: int) -> tuple[float, float]:
    """Of a process each, which then ends."""
    commands = [(OURS, ours), (name, theirs)]
    seconds = {}
    for started, command in commands if turn % 2 == 0 else commands[::-1]:
        peer = _start(started, command)
        seconds[started] = peer.load_s
        peer.close()
    return seconds[OURS], seconds[name]


def _compare(peers: tuple[Peer, Peer], case: Case, work: tuple[Work, Work], pairs: int) -> Comparison:
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for peer in peers:
        peer.ask(**case.request)  # the first run touches memory that the others find in place
    for turn in range(pairs):
        for peer in peers if turn % 2 == 0 else peers[::-1]:
            seconds[peer.name].append(peer.ask(**case.request)["seconds"])
    ours, theirs = (seconds[peer.name] for peer in peers)
    return Comparison(case.name, case.tokens, ours, theirs, *work)


def _work(model: Model, shape: LlamaShape) -> dict[str, tuple[Work, Work]]:
    """Of both engines, by case."""
    work = {}
    for batch, steps in STEPS.items():
        contexts = [PROMPT + steps // 2] * batch
        work[f"decode-{batch}"] = (glm_work(model.decode, batch, batch, contexts), shape.work(batch, batch, contexts))
    prefill = (glm_work(model.mixed, PREFILL, 1, [PREFILL]), shape.work(PREFILL, 1, [PREFILL]))
    return {**work, f"prefill-{PREFILL}": prefill}


def _shape(gguf: Path) -> LlamaShape:
    """The output layer is the embedding's matrix: each step reads it in full."""
    reader = GGUFReader(gguf)
    number = {
        key: int(reader.fields[f"llama.{key}"].contents())
        for key in ("block_count", "attention.head_count", "attention.head_count_kv", "embedding_length")
    }
    heads = number["attention.head_count"]
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) == 2]
    return LlamaShape(
        layers=number["block_count"],
        heads=heads,
        kv_heads=number["attention.head_count_kv"],
        head_dim=number["embedding_length"] // heads,
        weight_bytes=sum(int(tensor.n_bytes) for tensor in reader.tensors),
        weights=sum(int(tensor.n_elements) for tensor in matrices),
        head_weights=next(int(tensor.n_elements) for tensor in matrices if tensor.name == "token_embd.weight"),
    )


if __name__ == "__main__":
    main()
