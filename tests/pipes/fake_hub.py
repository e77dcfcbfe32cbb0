"""A Hugging Face hub of one model, on a port of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(ThreadingHTTPServer):
    """files: path -> content, of the model org/name. asked: the path of every request.
    sent: (path, first byte) of every download.

    stop_after: bytes of a file after which the connection breaks, None for never. missing: bytes of
    the weights that are promised, never sent and waited for; then it cannot go on in mid-file
    either. damaged: the weights that are sent have a wrong byte. refusing: what HTTP answer, an
    error, the weights get, 0 for them. headers: of that answer."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.asked: list[str] = []
        self.sent: list[tuple[str, int]] = []
        self.stop_after: int | None = None
        self.missing = 0
        self.damaged = False
        self.refusing = 0
        self.headers: dict[str, str] = {}
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[FakeHub]:
    """A hub that answers until the block ends."""
    with FakeHub(files) as hub:
        thread = threading.Thread(target=hub.serve_forever, args=[0.01])
        thread.start()
        try:
            yield hub
        finally:
            hub.closing.set()
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Repository information, the list of files, and the files, whole or from a byte on."""

    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *rest) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            names = [{"rfilename": name} for name in self.server.files]
            self._json({"id": "org/name", "sha": COMMIT, "siblings": names, "private": False})
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": _tag(name, data)}
                    for name, data in self.server.files.items()
                ]
            )
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self._file(path.split("/", 5)[5])
        else:
            kind = (
                "RevisionNotFound" if path.startswith("/api/models/org/name/") else "RepoNotFound"
            )
            self._answer(404, b"", {"X-Error-Code": kind, "X-Error-Message": "not here"})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        hub = self.server
        data = hub.files[name]
        headers = {"ETag": f'"{_tag(name, data)}"', "X-Repo-Commit": COMMIT}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if hub.missing:
            start = 0
        else:
            headers["Accept-Ranges"] = "bytes"
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            hub.sent.append((name, start))
        weights = name.endswith(".safetensors")
        if hub.refusing and weights:
            return self._answer(hub.refusing, b"", hub.headers)
        if hub.damaged and weights:
            data = data[:-1] + bytes([data[-1] ^ 1])
        missing = hub.missing if weights else 0
        self._answer(206 if start else 200, data[start:], headers, missing)

    def _answer(self, status: int, body: bytes, headers: dict, missing: int = 0) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) + missing))
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = self.server.stop_after
        if limit is not None and len(body) > limit:
            self.wfile.write(body[:limit])
            self.close_connection = True
            return
        self.wfile.write(body)
        if missing:
            self.wfile.flush()
            self.server.closing.wait()
            self.close_connection = True


def _tag(name: str, data: bytes) -> str:
    """The hash that names a blob: of a large file, or as git has it."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
