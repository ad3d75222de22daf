"""`make bench-peers`: this engine and llama.cpp on the same weights and threads, in turns.

Every case is a number of pairs, ours and the peer's one right after the other, each going first in turn, so that what
else the machine does falls on both. llama.cpp has the original model with every matrix as Q8_0, this engine its
conversion to GLM-4.7's shape in FP8: the same function, but with wider heads, replicated experts and a bf16 vocabulary.
So the table gives the ratio of tokens a second raw, per byte that a step reads, and per FLOP.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from gguf import GGUFReader
from rich.console import Console
from rich.table import Table

from deploy.models.catalog import DEFAULT_MODEL, resolve_model
from engine_worker.models import Model, build_model
from tests.bench.peers.compare import Comparison, LlamaShape, Work, glm_work
from tests.bench.peers.environment import ROOT, peer_python, q8_0_file
from tests.bench.peers.plot import draw
from tests.bench.peers.protocol import PROMPT, Answer, Peer

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
    parser.add_argument("--plot", action="store_true", help="draw build/peers/llama.png; needs matplotlib")
    arguments = parser.parse_args()
    python = peer_python()
    gguf = q8_0_file(python)
    checkpoint = resolve_model(DEFAULT_MODEL)
    ours, theirs = _commands(python, gguf, checkpoint, arguments.threads)
    loads = [_load_seconds(ours, theirs, turn) for turn in range(arguments.pairs)]
    peers = (_start("glmserve", ours), _start("llama.cpp", theirs))
    work = _work(build_model(checkpoint, "auto"), _shape(gguf))
    cases = [_compare(peers, case, work[case.name], arguments.pairs) for case in _cases(arguments.cases)]
    memory = [peer.ask(do="memory") for peer in peers]
    for peer in peers:
        peer.close()
    _report(cases, loads, memory, arguments.threads)
    if arguments.plot:
        draw(cases, "llama.cpp", ROOT / "llama.png")


def _commands(python: Path, gguf: Path, checkpoint: Path, threads: int) -> tuple[list[str], list[str]]:
    ours = [sys.executable, "-m", "tests.bench.peers.glm_runner", str(checkpoint), str(threads)]
    return ours, [str(python), "-m", "tests.bench.peers.llama_runner", str(gguf), str(threads)]


def _start(name: str, command: list[str]) -> Peer:
    return Peer(name, command, ROOT / f"{name}.log")


def _load_seconds(ours: list[str], theirs: list[str], turn: int) -> tuple[float, float]:
    """Of a process each, which then ends."""
    commands = [("glmserve", ours), ("llama.cpp", theirs)]
    seconds = {}
    for name, command in commands if turn % 2 == 0 else commands[::-1]:
        peer = _start(name, command)
        seconds[name] = peer.load_s
        peer.close()
    return seconds["glmserve"], seconds["llama.cpp"]


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


def _report(cases: list[Comparison], loads: list[tuple[float, float]], memory: list[Answer], threads: int) -> None:
    table = Table(title=f"this engine and llama.cpp, {threads} threads, medians of {len(loads)} pairs")
    for column in ("case", "ours, tokens/s", "llama.cpp", "ratio", "per byte", "per FLOP"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case in cases:
        ours, theirs = case.tokens_per_s()
        ratios = (case.ratio, case.ratio_per_byte, case.ratio_per_flop)
        table.add_row(case.name, f"{ours:.1f}", f"{theirs:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
    console = Console()
    console.print(table)
    for name, best, usage in zip(
        ("ours", "llama.cpp"), (min(times) for times in zip(*loads, strict=True)), memory, strict=True
    ):
        console.print(
            f"{name}: load {best:.2f} s, peak {usage['peak_mb']:.0f} MB, private {usage['private_mb']:.0f} MB"
        )
    for case in cases:
        mb, gflop = (
            f"{case.our_work.bytes / 1e6:.0f} and {case.peer_work.bytes / 1e6:.0f} MB",
            f"{case.our_work.flops / 1e9:.2f} and {case.peer_work.flops / 1e9:.2f} GFLOP",
        )
        console.print(f"{case.name}: a step takes {mb}, {gflop}", highlight=False)
    result = {
        "threads": threads,
        "cases": [
            asdict(case)
            | {"ratio": case.ratio, "ratio_per_byte": case.ratio_per_byte, "ratio_per_flop": case.ratio_per_flop}
            for case in cases
        ],
        "load_s": [{"ours": ours, "peer": peer} for ours, peer in loads],
        "memory": {"ours": memory[0], "peer": memory[1]},
    }
    path = ROOT / "llama.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
