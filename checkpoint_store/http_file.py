"""Fetches one file over http(s) into a directory: resumed where it broke off, tried again, never trusted half."""

import base64
import contextlib
import http.client
import json
import netrc
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nearline.protocol import Bytes, Seconds
from nearline.protocol.errors import Forbidden, InvalidRequest, NearlineError, SourceUnavailable, StorageFull

TIMEOUT_S: Seconds = 30.0
NUM_TRIES = 5
"""Tries in a row that bring no byte before a fetch is given up."""
RETRY_S: Seconds = 0.5
_BLOCK_BYTES: Bytes = 1024 * 1024
_SPARE_BYTES: Bytes = 16 * 1024 * 1024
_RETRIED = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[Bytes, Bytes], None]


class HttpFile:
    """One URL and the file it becomes: `NAME.part` and `NAME.part.json` (what it is a part of) until it is whole."""

    def __init__(self, url: str, target: Path, headers: Mapping[str, str] | None = None) -> None:
        """`headers` say who asks; without them, `credentials` does."""
        self.url = url
        self._headers = credentials(url) if headers is None else headers
        self.target = target
        self._part = target.with_name(target.name + ".part")
        self._state = target.with_name(target.name + ".part.json")

    def fetch(self, progress: Progress) -> bool:
        """Fetch the file, going on where an earlier fetch broke off; False if the server has no such file (404).

        A part is continued only if the server proves by its ETag or date that the file is still the same.
        Raises Forbidden, InvalidRequest, StorageFull or SourceUnavailable naming URL, cause and cure.
        """
        num_fruitless = 0
        while not self.target.exists():
            before = self._num_done()
            try:
                if not self._fetch_once(progress):
                    return False
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 404 or error.code == 410:
                    return False
                if error.code not in _RETRIED:
                    raise _refused(self.url, error.code) from None
                reason = f"the server answers {error.code} {error.reason}"
            except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
                reason = str(getattr(error, "reason", None) or error or type(error).__name__)
            else:
                continue
            num_fruitless = 0 if self._num_done() > before else num_fruitless + 1
            if num_fruitless >= NUM_TRIES:
                raise SourceUnavailable(
                    f"{self.url} cannot be fetched: {reason}; {self._num_done()} bytes are kept, import again to go on",
                    param="source",
                )
            time.sleep(RETRY_S * num_fruitless)
        return True

    def _num_done(self) -> Bytes:
        return self._part.stat().st_size if self._part.exists() else 0

    def _fetch_once(self, progress: Progress) -> bool:
        done, state = self._num_done(), self._read_state()
        headers = {"Accept-Encoding": "identity", **self._headers}
        validator = state.get("validator")
        if done and validator:
            headers |= {"Range": f"bytes={done}-", "If-Range": validator}
        try:
            response = _OPENER.open(urllib.request.Request(self.url, headers=headers), timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not done:
                raise
            error.close()
            if done == state.get("total"):
                self._commit()
            else:
                self._forget()
            return True
        with response:
            is_rest = response.status == 206 and _first_byte(response.headers) == done
            done = done if is_rest else 0
            length = response.headers.get("Content-Length")
            total = None if length is None else done + int(length)
            self._state.write_text(json.dumps({"validator": _validator(response.headers), "total": total}))
            self._check_space(total, done)
            self._receive(response, done, total, progress)
        self._commit()
        return True

    def _receive(
        self, response: http.client.HTTPResponse, done: Bytes, total: Bytes | None, progress: Progress
    ) -> None:
        with self._part.open("ab" if done else "wb", buffering=0) as file:
            progress(done, total or 0)
            while block := response.read1(_BLOCK_BYTES):
                try:
                    _write(file.fileno(), block)
                except OSError as error:
                    raise self._full(total, done, error.strerror or "") from error
                done += len(block)
                progress(done, max(total or 0, done))
        if total is not None and done != total:
            raise http.client.IncompleteRead(b"", total - done)

    def _check_space(self, total: Bytes | None, done: Bytes) -> None:
        if total is not None and shutil.disk_usage(self.target.parent).free < total - done + _SPARE_BYTES:
            raise self._full(total, done, "not enough space")

    def _full(self, total: Bytes | None, done: Bytes, reason: str) -> NearlineError:
        free = shutil.disk_usage(self.target.parent).free
        return StorageFull(
            f"{self.url} has {total or 'unknown many'} bytes of which {done} are here, {free} bytes are free in "
            f"{self.target.parent} ({reason}); free space or remove a model, then import again"
        )

    def _read_state(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self._state.read_text())
            return state if isinstance(state, dict) else {}
        return {}

    def _commit(self) -> None:
        os.replace(self._part, self.target)
        self._state.unlink(missing_ok=True)

    def _forget(self) -> None:
        self._part.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)


def credentials(url: str) -> dict[str, str]:
    """Give the Authorization header for a URL: HF_TOKEN for the hub's own host, else what ~/.netrc says.

    Raises InvalidRequest for a netrc file that cannot be understood.
    """
    host = urlsplit(url).hostname or ""
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    token = os.environ.get("HF_TOKEN")
    if token and (hub.scheme, hub.netloc) == urlsplit(url)[:2]:
        return {"Authorization": f"Bearer {token}"}
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except FileNotFoundError:
        return {}
    except (netrc.NetrcParseError, OSError) as error:
        raise InvalidRequest(f"the netrc file cannot be read: {error}", param="source") from None
    if not found:
        return {}
    pair = base64.b64encode(f"{found[0]}:{found[2]}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


class _CarefulRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects within http(s); credentials stay with the host they were meant for."""

    def redirect_request(  # type: ignore[no-untyped-def]
        self, req, fp, code, msg, headers, newurl
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise InvalidRequest(f"{req.full_url} redirects to {newurl}, which is no http(s) URL", param="source")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            following.remove_header("Authorization")
        return following


_OPENER = urllib.request.build_opener(_CarefulRedirects)


def _write(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while len(view):
        view = view[os.write(descriptor, view) :]


def _validator(headers: Mapping[str, str] | Message) -> str | None:
    etag = headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified")


def _first_byte(headers: Mapping[str, str] | Message) -> Bytes | None:
    value = str(headers.get("Content-Range", ""))
    first = value.removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else None


def _refused(url: str, status: int) -> NearlineError:
    host = urlsplit(url).hostname
    if status == 401:
        return Forbidden(
            f"{url}: the server answers 401, it wants credentials; put them into ~/.netrc for {host}", param="source"
        )
    if status == 403:
        return Forbidden(f"{url}: the server answers 403, the credentials for {host} do not suffice", param="source")
    return InvalidRequest(f"{url}: the server answers {status}; check the URL", param="source")
