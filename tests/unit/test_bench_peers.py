"""The arithmetic of `make bench-peers`, and what its processes say to each other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.peers.compare import Comparison, LlamaShape, Work
from tests.bench.peers.protocol import Peer, PeerError, parse_answer, prompts

CHILD = """
import json, sys
print(json.dumps({"load_s": 0.5}), flush=True)
for line in sys.stdin:
    if json.loads(line)["do"] == "end":
        break
    print(json.dumps({"seconds": 2.0}), flush=True)
"""


def test_ratios_are_medians_of_pairs_not_ratios_of_medians() -> None:
    case = Comparison("decode-4", 4, [1.0, 2.0, 4.0], [2.0, 2.0, 16.0], Work(30.0, 8.0), Work(10.0, 4.0))
    assert case.ratio == 2.0
    assert case.ratio_per_byte == 6.0
    assert case.ratio_per_flop == 4.0
    assert case.tokens_per_s() == (2.0, 2.0)


SHAPE = LlamaShape(layers=2, heads=4, kv_heads=2, head_dim=8, weight_bytes=1000, weights=900, head_weights=100)


def test_a_decode_step_reads_weights_once_and_each_sequences_keys_and_values() -> None:
    work = SHAPE.work(3, 3, [10, 10, 10])
    assert work.bytes == 1000 + 30 * 2 * 2 * 2 * 8 * 2
    assert work.flops == 2 * (3 * 900 + 30 * 2 * 2 * 4 * 8)


def test_a_prompt_passes_the_output_layer_once_and_sees_half_of_its_own_square() -> None:
    work = SHAPE.work(10, 1, [10])
    assert work.flops == 2 * (10 * 800 + 100 + 55 * 2 * 2 * 4 * 8)


def test_engines_get_the_same_prompts() -> None:
    assert prompts(2, 5, 100) == prompts(2, 5, 100)
    assert prompts(2, 5, 100)[0] != prompts(2, 5, 100)[1]


@pytest.mark.parametrize("line", ["", "loading\n", "[1]\n", '{"seconds": "fast"}\n', "3\n"])
def test_an_answer_that_is_no_object_of_numbers_is_refused(line: str) -> None:
    with pytest.raises(PeerError, match="llama said .* expected one JSON object of numbers"):
        parse_answer("llama", line)


def test_a_child_answers_and_its_end_is_told_with_the_place_of_its_log(tmp_path: Path) -> None:
    peer = Peer("llama", [sys.executable, "-c", CHILD], tmp_path / "log")
    assert peer.load_s == 0.5
    assert peer.ask(do="prefill", tokens=3) == {"seconds": 2.0}
    with pytest.raises(PeerError, match=r"llama ended with status 0; see .*log"):
        peer.ask(do="end")


def test_a_child_that_cannot_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="llama ended with status 3"):
        Peer("llama", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
