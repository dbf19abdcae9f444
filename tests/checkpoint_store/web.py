"""A web server on a loopback port that serves one directory with ranges and ETags, and breaks off when told to."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass
class Web:
    """What the server serves and how it misbehaves; `cuts` are consumed, one per GET of more than 4 KiB."""

    directory: Path
    url: str = ""
    authorization: str | None = None
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    redirects: dict[str, str] = field(default_factory=dict)
    has_etags: bool = True
    has_ranges: bool = True
    num_bytes: int = 0
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def etag(self, body: bytes) -> str:
        return f'"{hashlib.sha1(body).hexdigest()}"'


@contextmanager
def web(directory: Path, **settings: Any) -> Iterator[Web]:
    state = Web(directory, **settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(self.path.split("?")[0])
            state.requests.append((path, dict(self.headers)))
            if state.statuses:
                return self.answer(state.statuses.pop(0))
            if path in state.redirects:
                return self.answer(302, headers={"Location": state.redirects[path]})
            if state.authorization not in (None, self.headers.get("Authorization")):
                return self.answer(401 if "Authorization" not in self.headers else 403)
            file = state.directory / path.lstrip("/")
            return self.answer_file(file.read_bytes()) if file.is_file() else self.answer(404)

        def answer_file(self, body: bytes) -> None:
            etag, wanted = state.etag(body), self.headers.get("Range")
            headers = {"ETag": etag} if state.has_etags else {}
            if not wanted or not state.has_ranges or self.headers.get("If-Range", etag) != etag:
                return self.answer(200, body, headers)
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            if first >= len(body):
                return self.answer(416, headers={"Content-Range": f"bytes */{len(body)}"})
            headers["Content-Range"] = f"bytes {first}-{len(body) - 1}/{len(body)}"
            return self.answer(206, body[first:], headers)

        def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if len(body) > 4096 and state.cuts:
                body = body[: state.cuts.pop(0)]
                self.close_connection = True
            self.wfile.write(body)
            self.wfile.flush()
            state.num_bytes += len(body)

        def log_message(self, *_: Any) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
