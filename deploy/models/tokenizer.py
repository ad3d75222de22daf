"""The tokenizer files of a converted model."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from deploy.models.llama import Vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Byte-level BPE. Digits are split one by one first, as SmolLM2 was trained; GGUF only hints at that by a name."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in vocabulary.merges)]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(vocabulary.tokens[index], special=True, normalized=False) for index in vocabulary.special_ids]
    tokenizer.add_special_tokens(special)
    return tokenizer


def write_tokenizer(vocabulary: Vocabulary, context: int, directory: Path) -> None:
    build_tokenizer(vocabulary).save(str(directory / "tokenizer.json"))
    token = vocabulary.tokens.__getitem__
    config = {
        "add_prefix_space": False,
        "bos_token": token(vocabulary.bos_id),
        "chat_template": vocabulary.chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": token(vocabulary.eos_id),
        "model_max_length": context,
        "pad_token": token(vocabulary.pad_id),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": token(vocabulary.unk_id),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
