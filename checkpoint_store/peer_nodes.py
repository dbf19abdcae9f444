"""Nodes that are said to have one checkpoint: who answers, who is not asked again, what each of them gives.

The cluster's token goes to the nodes that were named and to nobody else: no answer that points elsewhere is followed.
"""

import http.client
import os
import queue
import threading
import time
import urllib.parse
from collections.abc import Sequence

import xxhash

from nearline.checkpoint_store.types import MANIFEST_NAME
from nearline.protocol import TOKEN_VARIABLE, Bytes, Digest, Seconds
from nearline.protocol.errors import CheckpointCorrupt, NotFound, SourceUnavailable

_NUM_ROUNDS = 4
"""How often every peer is asked for a piece before the copy is given up; a later one goes on from there."""
_RETRY_S: Seconds = 0.3
_CONNECT_S: Seconds = 2.0
_MEET_S: Seconds = 5.0
"""Who has not answered after this long when all are asked at once is not asked again."""
_GRACE_S: Seconds = 0.2
"""How long the first to answer waits for the others."""
_SILENCE_S: Seconds = 10.0
_MAX_SMALL_BYTES: Bytes = 64 << 20


class _Refused(Exception):
    """The node answered, and not with what it was asked for."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the node answers {status}")
        self.status = status


class Peers:
    """The nodes, asked in turn. Safe to use from several threads. One that cannot be reached, or falls silent, once is
    not asked again."""

    def __init__(self, digest: Digest, urls: Sequence[str]) -> None:
        self._base = f"checkpoints/{digest}"
        self._urls = [url.rstrip("/") for url in urls]
        token = os.environ.get(TOKEN_VARIABLE)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._gone: dict[str, str] = {}

    def meet(self) -> bytes:
        """Ask all at once for the manifest and return the first; from then on only those are asked who had one.

        Raises NotFound when none has it, SourceUnavailable when none answers in time.
        """
        answers: queue.SimpleQueue[tuple[str, bytes | Exception]] = queue.SimpleQueue()

        def ask(url: str) -> None:
            try:
                answers.put((url, bytes(self._receive(f"{url}/{self._base}/files/{MANIFEST_NAME}", None))))
            except Exception as error:
                answers.put((url, error))

        for url in self._urls:
            threading.Thread(target=ask, args=(url,), name="nearline-peer-meet", daemon=True).start()
        until, reasons, manifests = time.monotonic() + _MEET_S, dict.fromkeys(self._urls, "no answer"), list[bytes]()
        are_missing: list[bool] = []
        live: list[str] = []
        while len(are_missing) + len(live) < len(self._urls):
            try:
                url, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(answer, bytes):
                until = min(until, time.monotonic() + _GRACE_S)
                live.append(url)
                manifests.append(answer)
            else:
                reasons[url] = _reason(answer)
                are_missing.append(isinstance(answer, _Refused) and answer.status == http.client.NOT_FOUND)
        said = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
        if not live and len(are_missing) == len(self._urls) and all(are_missing):
            raise NotFound(f"no peer has {self._base} ({said}); import it from its source")
        if not live:
            raise SourceUnavailable(f"no peer gives {self._base}: {said}; what is here is kept, copy again")
        self._urls = [url for url in self._urls if url in live]
        return manifests[0]

    def small_file(self, name: str) -> bytes:
        """Fetch a text file whole."""
        return bytes(self._ask(f"files/{urllib.parse.quote(name)}", None, 0))

    def chunk(self, index: int, view: memoryview, digest: str) -> None:
        """Fetch one chunk into `view`, which is as long, from whichever peer gives the right bytes."""
        for turn in range(len(self._urls)):
            got = self._ask(f"chunks/{index}", view, index + turn)
            if len(got) == len(view) and xxhash.xxh3_128_hexdigest(got) == digest:
                return
        raise CheckpointCorrupt(
            f"chunk {index} of {self._base} does not have its digest {digest} on any of {', '.join(self._urls)}; "
            "verify the model there"
        )

    def _ask(self, path: str, view: memoryview | None, first: int) -> memoryview:
        """Ask peers in turn, from the one of number `first` on, going on within a broken answer.

        With None for a view it is a small file, whatever its size."""
        reason = "; ".join(self._gone.values())
        for _ in range(_NUM_ROUNDS):
            num_asked = num_missing = 0
            for turn in range(len(self._urls)):
                peer = self._urls[(first + turn) % len(self._urls)]
                if peer in self._gone:
                    continue
                num_asked += 1
                try:
                    return self._receive(f"{peer}/{self._base}/{path}", view)
                except (OSError, http.client.HTTPException, _Refused) as error:
                    reason = f"{peer}: {_reason(error)}"
                    num_missing += isinstance(error, _Refused) and error.status == http.client.NOT_FOUND
                    if isinstance(error, (ConnectionRefusedError, TimeoutError)):
                        self._gone[peer] = reason
            if num_asked == num_missing > 0 and not self._gone:
                raise NotFound(f"no peer has {self._base} ({reason}); import it from its source")
            if len(self._gone) == len(self._urls):
                break
            time.sleep(_RETRY_S)
        raise SourceUnavailable(f"no peer gives {path} of {self._base}: {reason}; what is here is kept, copy again")

    def _receive(self, url: str, view: memoryview | None) -> memoryview:
        done = total = 0
        while True:
            headers = self._headers | ({"Range": f"bytes={done}-"} if done else {})
            before = done
            try:
                with _Answer(url, headers) as answer:
                    total = done + answer.length
                    most = _MAX_SMALL_BYTES if view is None else len(view)
                    if total > most:
                        raise http.client.HTTPException(f"it gives {total} bytes where {most} were expected")
                    if view is None:
                        view = memoryview(bytearray(total))
                    while got := answer.read_into(view[done:total]):
                        done += got
            except TimeoutError:
                raise
            except (OSError, http.client.HTTPException):
                if done == before:
                    raise
            if view is not None and done == total:
                return view[:done]
            if done == before:
                raise http.client.IncompleteRead(b"", total - done)


class _Answer:
    """What one node says to one GET. Reaching it has a short time, each silence of it a longer one. No redirects, no
    proxies."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urllib.parse.urlsplit(url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.netloc, timeout=_CONNECT_S)
        try:
            self._connection.connect()
            self._connection.sock.settimeout(_SILENCE_S)
            self._connection.request("GET", parts.path, headers=headers)
            self._response = self._connection.getresponse()
            if self._response.status not in (http.client.OK, http.client.PARTIAL_CONTENT):
                raise _Refused(self._response.status)
            if self._response.length is None:
                raise http.client.HTTPException("it does not say how many bytes it gives")
        except BaseException:
            self._connection.close()
            raise
        self.length: Bytes = self._response.length

    def __enter__(self) -> "_Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()

    def read_into(self, view: memoryview) -> Bytes:
        return self._response.readinto(view)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
