"""A Hugging Face hub on a loopback port: one repository, some of the answers of the real one, cut short when told."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "1234567890abcdef1234567890abcdef12345678"


@dataclass
class Manners:
    """How the hub behaves: a token it wants, transfers it cuts (one number of bytes per large GET), a sha256 it claims,
    files it lists and does not give; and the bytes it sent."""

    token: str | None = None
    cuts: list[int] = field(default_factory=list)
    sha256: str | None = None
    is_gated: bool = False
    num_bytes: int = 0
    ranges: list[str] = field(default_factory=list)


@contextmanager
def hub(repo_id: str, directory: Path, requests: list[str], manners: Manners | None = None) -> Iterator[str]:
    """Serve `directory` as `repo_id`; `requests` collects the paths asked for. Yields the endpoint."""
    manners = manners or Manners()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            requests.append(path)
            given = self.headers.get("Authorization")
            if manners.token and given != f"Bearer {manners.token}":
                message = "Invalid credentials in Authorization header" if given else "Repository not found"
                code = {} if given else {"X-Error-Code": "RepoNotFound"}
                self.answer(b"{}", 401, {"X-Error-Message": message, **code})
            elif path.startswith(f"/api/models/{repo_id}") and not path.endswith("/nowhere"):
                siblings = [sibling(p, directory, manners.sha256) for p in files(directory)]
                self.answer(json.dumps({"id": repo_id, "sha": SHA, "siblings": siblings}).encode())
            elif path.startswith(f"/{repo_id}/resolve/") and manners.is_gated:
                self.answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
            elif path.startswith(f"/{repo_id}/resolve/"):
                self.answer((directory / path.split("/", 5)[5]).read_bytes())
            else:
                code = "RevisionNotFound" if path.endswith("/nowhere") else "RepoNotFound"
                self.answer(b"{}", 404, {"X-Error-Code": code})

        def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            etag, wanted = hashlib.sha1(body).hexdigest(), self.headers.get("Range")
            if wanted and status == 200:
                first = int(wanted.removeprefix("bytes=").split("-")[0])
                headers = {"Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
                status, body = 206, body[first:]
                manners.ranges.append(wanted)
            self.send_response(status)
            standard = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Content-Length": str(len(body))}
            for name, value in {**standard, **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                if len(body) > 65536 and manners.cuts:
                    body = body[: manners.cuts.pop(0)]
                    self.close_connection = True
                self.wfile.write(body)
                manners.num_bytes += len(body)

        def log_message(self, *_: Any) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def sibling(path: Path, directory: Path, sha256: str | None) -> dict[str, Any]:
    name, body = str(path.relative_to(directory)), path.read_bytes()
    lfs = {"sha256": sha256 or hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
    is_large = name.endswith(".safetensors")
    return {"rfilename": name, "size": len(body), "blobId": "0" * 40, "lfs": lfs if is_large else None}
