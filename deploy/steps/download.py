"""A checkpoint into the volume: resumable, every file held against the hub's own list of sizes and SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from deploy.errors import ModelError
from deploy.models.catalog import CATALOG
from deploy.models.fetch import fetch
from deploy.models.progress import Progress, silent

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "LICENSE*", "README.md")
RECORD = "glmserve-download.json"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HubFile:
    """A file as the hub lists it. `sha256` is None of small files, which git holds."""

    name: str
    size: int
    sha256: str | None


def download(
    source: str, volume: Path, revision: str = "main", progress: Progress = silent, endpoint: str | None = None
) -> Path:
    """The checkpoint directory of `source` in `volume`: an embedded model's name, or a hub repository ORG/NAME.

    `endpoint`: the hub's address; None is huggingface_hub's own, which HF_ENDPOINT sets.
    What is there and right is not fetched again; a file that was cut off goes on where it ended. ModelError: no such
    source or revision, a file that differs from the hub's list after the download, a shard that is missing.
    """
    if source in CATALOG:
        return fetch(source, volume, progress)
    if source.count("/") != 1:
        raise ModelError(
            f"unknown model {source!r}: give a hub repository, ORG/NAME, or one of {', '.join(sorted(CATALOG))}"
        )
    directory = volume / "models" / source.split("/")[1]
    commit, files = _listing(source, revision, endpoint)
    if _recorded(directory) == (source, commit) and not _wrong_sizes(directory, files):
        return directory
    progress(f"downloading {source}", 0, 0)
    _fetch_files(source, commit, directory, endpoint)
    verify(directory, files, progress)
    check_shards(directory)
    record = {"source": source, "commit": commit, "files": {file.name: file.size for file in files}}
    (directory / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    return directory


def verify(directory: Path, files: Sequence[HubFile], progress: Progress = silent) -> None:
    """ModelError naming the files whose size or SHA-256 is not the listed one; they are removed, to be fetched anew."""
    wrong = _wrong_sizes(directory, files)
    done, total = 0, sum(file.size for file in files)
    hashed = [file for file in files if file.sha256 is not None and file.name not in wrong]
    with ThreadPoolExecutor() as pool:
        for file, digest in zip(hashed, pool.map(lambda file: _sha256(directory / file.name), hashed), strict=True):
            done += file.size
            progress("verifying", done, total)
            if digest != file.sha256:
                wrong.append(file.name)
    for name in wrong:
        (directory / name).unlink(missing_ok=True)
    if wrong:
        raise ModelError(f"{directory}: not as the hub has them, and removed: {', '.join(wrong)}. Download again")


def check_shards(directory: Path) -> None:
    """ModelError unless every shard that the index names is there."""
    index = directory / _INDEX
    if not index.is_file():
        if (directory / "model.safetensors").is_file():
            return
        raise ModelError(f"{directory}: neither {_INDEX} nor model.safetensors: not a safetensors checkpoint")
    try:
        shards = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index}: no weight_map; download it again") from None
    missing = sorted(shard for shard in shards if not (directory / shard).is_file())
    if missing:
        raise ModelError(f"{directory}: {len(missing)} of {len(shards)} shards missing, first {missing[0]}")


def _listing(source: str, revision: str, endpoint: str | None) -> tuple[str, list[HubFile]]:
    """The commit of `revision`, and its files that a checkpoint is made of."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        info = HfApi(endpoint).model_info(source, revision=revision, files_metadata=True)
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{source} at {revision!r}: {_first_line(error)}. HF_TOKEN lets in where one is needed"
        ) from None
    assert info.sha is not None
    return info.sha, [
        HubFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or ()
        if any(fnmatch(sibling.rfilename, pattern) for pattern in PATTERNS)
    ]


def _fetch_files(source: str, commit: str, directory: Path, endpoint: str | None) -> None:
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    try:
        snapshot_download(
            source, revision=commit, local_dir=directory, allow_patterns=list(PATTERNS), endpoint=endpoint
        )
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"downloading {source}: {_first_line(error)}. Run it again: it goes on where it ended"
        ) from None


def _recorded(directory: Path) -> tuple[str, str] | None:
    try:
        record = json.loads((directory / RECORD).read_text())
        return record["source"], record["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _wrong_sizes(directory: Path, files: Sequence[HubFile]) -> list[str]:
    return [
        file.name
        for file in files
        if not (directory / file.name).is_file() or (directory / file.name).stat().st_size != file.size
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
