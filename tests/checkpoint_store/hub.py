"""A Hugging Face hub on a loopback port: one repository, some of the answers of the real one."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "1234567890abcdef1234567890abcdef12345678"


@contextmanager
def hub(repo_id: str, directory: Path, requests: list[str]) -> Iterator[str]:
    """Serve `directory` as `repo_id`; `requests` collects the paths asked for. Yields the endpoint."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            requests.append(path)
            if path.startswith(f"/api/models/{repo_id}/tree/"):
                self.answer(json.dumps([entry(p) for p in files()]).encode())
            elif path.startswith(f"/api/models/{repo_id}") and not path.endswith("/nowhere"):
                siblings = [{"rfilename": str(p.relative_to(directory))} for p in files()]
                self.answer(json.dumps({"id": repo_id, "sha": SHA, "siblings": siblings}).encode())
            elif path.startswith(f"/{repo_id}/resolve/"):
                self.answer((directory / path.split("/", 5)[5]).read_bytes())
            else:
                code = "RevisionNotFound" if path.endswith("/nowhere") else "RepoNotFound"
                self.answer(b"{}", 404, {"X-Error-Code": code})

        def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            etag = hashlib.sha1(body).hexdigest()
            standard = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Content-Length": str(len(body))}
            for name, value in {**standard, **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Stay silent."""

    def files() -> list[Path]:
        return sorted(path for path in directory.rglob("*") if path.is_file())

    def entry(path: Path) -> dict[str, Any]:
        name = str(path.relative_to(directory))
        return {
            "type": "file",
            "path": name,
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
