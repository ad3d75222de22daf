"""The embedded model's greedy answers on the table under test against the CPU's, token by token and logit by logit.

`GLM_TEST_TABLE=cuda python -m tests.golden.embedded_text [--tp 2 --ep 2 [--all-to-all]]`. Needs NumPy, tokenizers and
the checkpoint (`glm model fetch`). Where a text differs, both tables' two best logits there are printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from deploy.models.catalog import SMOLLM2, SMOLLM2_4KV, resolve_model
from engine_worker.models.exchange import REPLICATED, Exchanges
from engine_worker.models.layout import ONE_RANK, Parallelism
from engine_worker.runtime.records import Sampling
from tests.golden.session import Logits, Session, Tokens, generate, open_session
from tests.golden.table import MAX_CONTEXT, TABLE

PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "The three primary colours are",
    "In 1969, the first man on the Moon",
    "Roses are red,",
    "The opposite of hot is",
    "A triangle has three",
    "The largest planet of the solar system is",
    "To make bread you need flour,",
    "Monday, Tuesday, Wednesday,",
    "The author of Hamlet is",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "One plus one is",
    "The chemical symbol of gold is",
    "A good way to learn a language is",
    "The sun rises in the",
    "Photosynthesis is the process by which",
)
TOKENS = 48
# Between two right tables. Sums in another order flip FP8 codes in each of 30 layers: the CPU's own instruction sets
# differ by 0.50 and 0.68 within the first 12 tokens after these prompts.
SPREAD_TOLERANCE = 1.0  # standard deviation of a step's differences: a softmax does not see their mean
LEAD_TOLERANCE = 1.0  # of one token over another, where the texts part
SCORED_TOKENS = 960
PERPLEXITY_TOLERANCE = 0.03  # relative


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and the logits that each was taken from."""

    tokens: list[int]
    logits: list[Logits]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to `prompt`: equal up to `place`, which is None if to the end; differences while inputs are equal."""

    prompt: str
    place: int | None
    lead: float  # of the expected token over the found one, by the logits expected at `place`
    spread: float  # of a step's logits, at most
    largest: float  # of any logit

    @property
    def ok(self) -> bool:
        return self.spread <= SPREAD_TOLERANCE and self.lead <= LEAD_TOLERANCE


def answers(session: Session, prompts: list[Tokens], count: int) -> list[Answer]:
    return [Answer(*generate(session, prompt, count, Sampling())) for prompt in prompts]


def compare(prompt: str, expected: Answer, found: Answer) -> Comparison:
    pairs = list(zip(expected.tokens, found.tokens, strict=True))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    common = slice(len(pairs) if place is None else place + 1)
    differences = [a - b for a, b in zip(expected.logits[common], found.logits[common], strict=True)]
    spread = max(float(difference.std()) for difference in differences)
    largest = max(float(np.abs(difference).max()) for difference in differences)
    if place is None:
        return Comparison(prompt, None, 0.0, spread, largest)
    a, b = pairs[place]
    row = expected.logits[place]
    return Comparison(prompt, place, float(row[a] - row[b]), spread, largest)


def perplexity(session: Session, tokens: Tokens) -> float:
    """Of `tokens`, in pieces of MAX_CONTEXT that know nothing of each other."""
    losses = []
    for piece in np.split(tokens, range(MAX_CONTEXT, len(tokens), MAX_CONTEXT)):
        logits = session.decode(piece)[:-1].astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        losses += list(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(piece) - 1), piece[1:]])
    return float(np.exp(np.mean(losses)))


def best_two(row: Logits) -> str:
    return ", ".join(f"{token}: {row[token]:.3f}" for token in np.argsort(row)[:-3:-1])


@dataclass(frozen=True, slots=True)
class Result:
    """`pairs`: the CPU's answer and the tested table's; perplexities likewise."""

    comparisons: list[Comparison]
    pairs: list[tuple[Answer, Answer]]
    perplexities: list[float]

    @property
    def problems(self) -> list[str]:
        found = [f"{comparison}" for comparison in self.comparisons if not comparison.ok]
        expected, tested = self.perplexities
        if tested > expected * (1 + PERPLEXITY_TOLERANCE):
            found.append(f"perplexity {tested:.3f}, the CPU's is {expected:.3f}")
        return found


def run(model: Path, layout: Parallelism = ONE_RANK, exchanges: Exchanges = REPLICATED, count: int = TOKENS) -> Result:
    """Each prompt on the CPU and on the table under test, in the same layout: scales of FP8 depend on it."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompts = [np.array(tokenizer.encode(prompt).ids, np.int32) for prompt in PROMPTS]
    assert max(map(len, prompts)) + count <= MAX_CONTEXT
    english = np.array(tokenizer.encode((model / "LICENSE").read_text()).ids[:SCORED_TOKENS], np.int32)
    texts, perplexities = [], []
    for table in ("cpu", TABLE):
        with open_session(
            model, parallelism=layout, exchanges=exchanges, table=table, num_threads=os.cpu_count() or 1
        ) as session:
            texts.append(answers(session, prompts, count))
            perplexities.append(perplexity(session, english))
    pairs = list(zip(*texts, strict=True))
    return Result([compare(prompt, *pair) for prompt, pair in zip(PROMPTS, pairs, strict=True)], pairs, perplexities)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int)
    parser.add_argument("--all-to-all", action="store_true")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    asked = parser.parse_args()
    model = asked.model or resolve_model((SMOLLM2 if asked.tp == 1 else SMOLLM2_4KV).name)
    exchanges = Exchanges("all_to_all", "all_to_all") if asked.all_to_all else REPLICATED
    result = run(model, Parallelism(asked.tp, asked.ep), exchanges, asked.tokens)
    for comparison, (expected, found) in zip(result.comparisons, result.pairs, strict=True):
        place = comparison.place
        print(
            f"{comparison.prompt!r:45} logits differ by {comparison.spread:.3f}, at most {comparison.largest:.3f}",
            end="",
        )
        print("" if place is None else f"; token {place} differs, lead {comparison.lead:.3f}")
        if place is not None:
            print(f"  cpu  {best_two(expected.logits[place])}\n  {TABLE} {best_two(found.logits[place])}")
    equal = sum(comparison.place is None for comparison in result.comparisons)
    print(f"{equal} of {len(PROMPTS)} texts of {asked.tokens} tokens are equal")
    print(f"perplexity of {SCORED_TOKENS} tokens of English: cpu {result.perplexities[0]:.4f}, ", end="")
    print(f"{TABLE} {result.perplexities[1]:.4f}")
    print(*result.problems, sep="\n")
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
