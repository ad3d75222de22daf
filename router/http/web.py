"""GET /: the chat page. Its three files are all that it needs; the browser is told to load nothing else."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

_DIRECTORY = Path(__file__).with_name("web")
_FILES = {"/": "index.html", "/chat.js": "chat.js", "/chat.css": "chat.css"}
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
PATHS = frozenset(_FILES)
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add(app: FastAPI) -> None:
    """Add the routes."""
    for path, name in _FILES.items():
        _add_file(app, path, _DIRECTORY / name)


def _add_file(app: FastAPI, path: str, file: Path) -> None:
    content, kind = file.read_bytes(), _KINDS[file.suffix]

    @app.get(path)
    async def send() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)
