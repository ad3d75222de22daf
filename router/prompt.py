"""The prompt of a Generate request: its ids, and what an echo of it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glmserve.inference.v1 import inference_pb2
from glmserve.service.status import InvalidArgumentError
from router.errors import UnsupportedError
from router.model import TextModel
from router.text.detokenizer import echo_text
from router.validation import ModelLimits, check_prompt, check_token_ids

# A gap is shown to the model as: what is before it, what is after it, and then what fills it.
_GAP_TOKENS = ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>")


@dataclass(frozen=True)
class GeneratePrompt:
    """`field`: of the request, that errors name. `echo`: what the text begins with; None: not with the prompt."""

    field: str
    ids: Sequence[int]
    echo: str | None = None


async def prompt_of(request: inference_pb2.GenerateRequest, model: TextModel, limits: ModelLimits) -> GeneratePrompt:
    """Raises InvalidArgumentError. Raises UnsupportedError: there is a suffix, and the checkpoint fills no gaps."""
    if request.suffix and request.echo:
        raise InvalidArgumentError("echo", "set together with suffix; allowed: one of them")
    field, ids = await _given(request, model, limits)
    if request.suffix:
        return GeneratePrompt(field, await _around_gap(request.suffix, model, ids))
    return GeneratePrompt(field, ids, echo_text(model.tokenizer, ids) if request.echo else None)


async def _given(
    request: inference_pb2.GenerateRequest, model: TextModel, limits: ModelLimits
) -> tuple[str, Sequence[int]]:
    given = request.WhichOneof("input")
    if given == "prompt_ids":
        # Before each of them is looked at: a message has room for millions.
        check_prompt("prompt_ids.ids", request.prompt_ids.ids, limits)
        check_token_ids("prompt_ids.ids", request.prompt_ids.ids, limits.vocab_size)
        return "prompt_ids.ids", list(request.prompt_ids.ids)
    if given is None:
        raise InvalidArgumentError("prompt", "missing; set prompt or prompt_ids")
    return "prompt", await model.tokenizer.encode(request.prompt, add_special_tokens=not request.suffix)


async def _around_gap(suffix: str, model: TextModel, ids: Sequence[int]) -> list[int]:
    known = model.tokenizer.added_ids
    if not all(token in known for token in _GAP_TOKENS):
        raise UnsupportedError(
            f"suffix: the checkpoint fills no gaps: its tokeniser lacks one of {', '.join(_GAP_TOKENS)}"
        )
    before, after, middle = (known[token] for token in _GAP_TOKENS)
    # What the tokeniser itself puts before a text.
    special = await model.tokenizer.encode("", add_special_tokens=True)
    suffix_ids = await model.tokenizer.encode(suffix, add_special_tokens=False)
    return [*special, before, *ids, after, *suffix_ids, middle]
