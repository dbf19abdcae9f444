"""The node's own HTTP: small files and chunks of its checkpoints for the controller and for peers, and its health."""

import asyncio
import hmac
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from nearline.checkpoint_store import CheckpointStore, Manifest
from nearline.checkpoint_store.types import MANIFEST_NAME, WEIGHTS_NAME
from nearline.protocol import Digest
from nearline.protocol.errors import ERRORS, NearlineError, NotFound, Unauthorized

_DIGEST = re.compile(r"[0-9a-f]{32}")
_PIECE_BYTES = 1024 * 1024


class NodeHttp:
    """Serves only what manifests list, by exact name: no path from outside ever reaches the file system."""

    def __init__(self, store: CheckpointStore, token: str | None, health: Callable[[], dict[str, Any]]) -> None:
        self._store = store
        self._token = token
        self._health = health
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port (given or chosen). Raises OSError when it is taken."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._get_health)
        app.router.add_get("/checkpoints/{digest}/files/{name:.+}", self._get_file)
        app.router.add_get("/checkpoints/{digest}/chunks/{index}", self._get_chunk)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        chosen: int = self._runner.addresses[0][1]
        return chosen

    async def close(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "")
            is_open = self._token is None or request.path == "/health"
            if not is_open and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise Unauthorized("this node wants its cluster token as `Authorization: Bearer …`")
            return await handler(request)
        except NearlineError as error:
            return _problem(error)
        except web.HTTPException as error:
            return _problem(NotFound(f"{request.method} {request.path}: {error.reason}"), error.status)

    async def _get_health(self, _request: web.Request) -> web.Response:
        return web.json_response(self._health())

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        manifest, directory = self._find(request)
        name = request.match_info["name"]
        if name not in (*manifest.info.files, MANIFEST_NAME):
            raise NotFound(f"checkpoint {manifest.digest} has no file {name!r}; it has {sorted(manifest.info.files)}")
        return web.FileResponse(directory / name)

    async def _get_chunk(self, request: web.Request) -> web.StreamResponse:
        manifest, directory = self._find(request)
        if self._store.is_remote(manifest.digest):
            raise NotFound(
                f"checkpoint {manifest.digest} was evicted from this node's SSD; ask another node for chunks"
            )
        text = request.match_info["index"]
        index = int(text) if re.fullmatch(r"\d{1,9}", text) else len(manifest.chunk_digests)
        if index >= len(manifest.chunk_digests):
            raise NotFound(
                f"checkpoint {manifest.digest} has chunks 0 to {len(manifest.chunk_digests) - 1}, not {text}"
            )
        first = index * manifest.chunk_bytes
        size = min(manifest.chunk_bytes, manifest.num_bytes - first)
        try:
            start, stop, _ = request.http_range.indices(size)
        except ValueError as error:
            raise web.HTTPRequestRangeNotSatisfiable(reason=str(error)) from None
        is_part = "Range" in request.headers
        if is_part and start >= stop:
            raise web.HTTPRequestRangeNotSatisfiable(reason=f"the chunk has {size} bytes")
        response = web.StreamResponse(status=206 if is_part else 200)
        response.content_length = stop - start
        response.headers["Accept-Ranges"] = "bytes"
        response.headers["ETag"] = f'"{manifest.chunk_digests[index]}"'
        if is_part:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        await response.prepare(request)
        await _send_range(response, directory / WEIGHTS_NAME, first + start, first + stop)
        return response

    def _find(self, request: web.Request) -> tuple[Manifest, Path]:
        digest = request.match_info["digest"]
        if not _DIGEST.fullmatch(digest):
            raise NotFound(f"{digest!r} is not a checkpoint digest (32 hex digits)")
        manifest = self._store.manifest(Digest(digest))
        return manifest, self._store.directory(manifest.digest)


async def _send_range(response: web.StreamResponse, path: Path, start: int, stop: int) -> None:
    fd = await asyncio.to_thread(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while start < stop:
            piece = await asyncio.to_thread(os.pread, fd, min(_PIECE_BYTES, stop - start), start)
            if not piece:
                raise ConnectionError(f"{path} ends at byte {start}, expected {stop}")
            await response.write(piece)
            start += len(piece)
        await response.write_eof()
    finally:
        os.close(fd)


def _problem(error: NearlineError, status: int | None = None) -> web.Response:
    row = ERRORS[type(error)]
    body = {"error": {"message": error.message, "type": row.type, "param": error.param, "code": row.code}}
    return web.json_response(body, status=status or row.status)
