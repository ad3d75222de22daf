"""A byte-level tokeniser in which <tool_call> and its like are tokens, and what a grammar makes of a text."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from glmserve.engine.v1 import engine_pb2
from router.text.tool_calls import TAGS

EOS = "<|endoftext|>"


@lru_cache(maxsize=1)
def tokenizer() -> Tokenizer:
    """One token a byte, then EOS and TAGS."""
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = ByteLevel()
    made.add_special_tokens([AddedToken(EOS, special=True)])
    made.add_tokens([AddedToken(tag, special=False) for tag in TAGS])
    return made


TAG_IDS = {
    token.content: token_id
    for token_id, token in tokenizer().get_added_tokens_decoder().items()
    if token.content in TAGS
}


@lru_cache(maxsize=1)
def _guidance() -> LLTokenizer:
    return LLTokenizer(tokenizer().to_str(), eos_token=tokenizer().token_to_id(EOS))


# The scripted engine's 50 tokens: characters, the end of the reasoning, the end of the text.
CHARACTERS = '0123456789{}[]":,.- abcdefghijklmnopqrstuvwxyzABCDEF\n_'[:48]
END_OF_THINKING, END_OF_TEXT = 48, 49


def write_small_tokenizer(directory: Path) -> Path:
    """`directory` with a tokenizer.json of CHARACTERS, END_OF_THINKING and END_OF_TEXT."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {byte_level.pre_tokenize_str(character)[0][0]: i for i, character in enumerate(CHARACTERS)}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = byte_level
    made.decoder = ByteLevel()
    made.add_special_tokens([AddedToken("</think>", special=True), AddedToken("<|end|>", special=True)])
    made.save(str(directory / "tokenizer.json"))
    return directory


def small_text(token_ids: Sequence[int]) -> str:
    """What the small tokeniser's ids spell, without an end of the text."""
    return "".join(CHARACTERS[i] for i in token_ids if i != END_OF_TEXT)


def verdict(constraint: engine_pb2.Constraint, text: str, *, spelled: bool = False) -> str:
    """ "whole", "part" or "refused". `spelled`: tags are written letter by letter."""
    kind = constraint.WhichOneof("kind") or ""
    matcher = LLMatcher(_guidance(), getattr(LLMatcher, f"grammar_from_{kind}")(getattr(constraint, kind)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    encoded = [tokenizer().encode(c).ids for c in text] if spelled else [tokenizer().encode(text).ids]
    if not all(matcher.consume_token(token_id) for ids in encoded for token_id in ids):
        return "refused"
    return "whole" if matcher.is_accepting() else "part"
