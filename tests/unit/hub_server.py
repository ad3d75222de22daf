"""A hub in this process: one repository, served as huggingface_hub asks for it, with ranges and with faults."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40
REPOSITORY = "org/small"


class Hub:
    """`files` are what it serves. `listed` overrides what it says of a file: (size, SHA-256).

    `cut_once`: files whose first answer ends after that many bytes. `served`: bytes sent of each file. `ranges`: where
    each answer began.
    """

    def __init__(self, directory: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}
        self.listed: dict[str, tuple[int, str]] = {}
        self.cut_once: dict[str, int] = {}
        self.served: dict[str, int] = {}
        self.ranges: list[tuple[str, int]] = []
        self.url = ""

    def listing(self) -> list[dict[str, object]]:
        """As `siblings` of the model's metadata."""
        entries = []
        for name, data in self.files.items():
            size, digest = self.listed.get(name, (len(data), hashlib.sha256(data).hexdigest()))
            entry: dict[str, object] = {"rfilename": name, "size": size}
            if name.endswith(".safetensors"):
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            entries.append(entry)
        return entries


@contextmanager
def running_hub(directory: Path) -> Iterator[Hub]:
    """Serve the files of `directory` as REPOSITORY."""
    hub = Hub(directory)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(head=True)

        def do_GET(self) -> None:
            self._answer(head=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, *, head: bool) -> None:
            path = self.path.split("?")[0]
            if re.fullmatch(rf"/api/models/{REPOSITORY}(/revision/(main|{COMMIT}))?", path):
                self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": hub.listing()}).encode(), {}, head)
            elif path.startswith(f"/api/models/{REPOSITORY}/tree/"):
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in hub.files.items()
                ]
                self._send(json.dumps(tree).encode(), {}, head)
            elif (name := path.rpartition("/")[2]) in hub.files and f"/resolve/{COMMIT}/" in path:
                self._send_file(name, head)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _send_file(self, name: str, head: bool) -> None:
            data = hub.files[name]
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            begin = int(asked[1]) if asked else 0
            if not head:
                hub.ranges.append((name, begin))
            cut = hub.cut_once.pop(name, None) if not head else None
            if asked:
                headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            self._send(data[begin:], headers, head, 206 if asked else 200, cut)
            if not head:
                hub.served[name] = hub.served.get(name, 0) + (len(data) - begin if cut is None else cut)

        def _send(
            self, body: bytes, headers: dict[str, str], head: bool, status: int = 200, cut: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if not head:
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
