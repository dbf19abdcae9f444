"""Adapters' bytes for engines to copy: one pin in the store per read, until the engine says that it has read."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import structlog

from nearline.checkpoint_store import CheckpointStore, Lease, ReadStats
from nearline.node_agent.types import EngineId
from nearline.protocol import Digest
from nearline.protocol.errors import NearlineError
from nearline.protocol.frames import AdapterBytes

log = structlog.get_logger()


class AdapterLeases:
    """Owns what is lent to engines. A pin ends when its engine gives it back or its process is gone, never before:
    bytes that an engine may still read stay what they are."""

    def __init__(self, store: CheckpointStore, to_engine: Callable[[EngineId, object], None]) -> None:
        self._store = store
        self._to_engine = to_engine
        self._loop = asyncio.get_running_loop()
        self._lent: dict[EngineId, dict[int, Lease]] = {}
        self._coming: dict[tuple[EngineId, Digest], None] = {}
        self._ids = itertools.count(1)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="nearline-adapters")

    def lend(self, engine_id: EngineId, digest: Digest) -> AdapterBytes | None:
        """Say where an adapter's bytes are if all are in DRAM. Else bring them there and send it then; what cannot be
        brought is sent without extents, and the engine reads the directory and says what is wrong with it."""
        lent = self._lent.setdefault(engine_id, {})
        if (engine_id, digest) in self._coming:
            return None
        lease = self._store.acquire_resident(digest)
        if lease is not None:
            lease_id = next(self._ids)
            lent[lease_id] = lease
            return AdapterBytes(digest, lease.extents, lease_id)
        self._coming[engine_id, digest] = None
        future = self._loop.run_in_executor(self._threads, self._store.acquire, digest)
        future.add_done_callback(partial(self._acquired, engine_id, digest))
        return None

    def wanted(self, engine_id: EngineId, digest: Digest) -> None:
        """Answer an engine that is about to read an adapter."""
        lent = self.lend(engine_id, digest)
        if lent is not None:
            self._to_engine(engine_id, lent)

    def free(self, engine_id: EngineId, lease_id: int) -> None:
        """Take back what an engine has read."""
        lease = self._lent.get(engine_id, {}).pop(lease_id, None)
        if lease is not None:
            lease.release()

    def gone(self, engine_id: EngineId) -> None:
        """Take back all that was lent to a process that has ended."""
        self._coming = {key: None for key in self._coming if key[0] != engine_id}
        for lease in self._lent.pop(engine_id, {}).values():
            lease.release()

    def close(self) -> None:
        """Take everything back. The processes must be gone."""
        self._threads.shutdown(cancel_futures=True)
        for engine_id in list(self._lent):
            self.gone(engine_id)

    def _acquired(self, engine_id: EngineId, digest: Digest, done: "asyncio.Future[Lease]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            self._answer(engine_id, AdapterBytes(digest, (), 0), error)
            return
        lease = done.result()
        if engine_id not in self._lent:
            lease.release()
            return
        lease_id = next(self._ids)
        self._lent[engine_id][lease_id] = lease

        def when_read(read: "Future[ReadStats]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: the agent is going
                self._loop.call_soon_threadsafe(self._read, engine_id, lease_id, read.exception())

        lease.done.add_done_callback(when_read)

    def _read(self, engine_id: EngineId, lease_id: int, error: BaseException | None) -> None:
        lease = self._lent.get(engine_id, {}).get(lease_id)
        if lease is None:
            return
        if error is None:
            self._answer(engine_id, AdapterBytes(lease.digest, lease.extents, lease_id))
        else:
            self.free(engine_id, lease_id)
            self._answer(engine_id, AdapterBytes(lease.digest, (), 0), error)

    def _answer(self, engine_id: EngineId, answer: AdapterBytes, error: BaseException | None = None) -> None:
        self._coming.pop((engine_id, answer.digest), None)
        if error is not None:
            reason = error.message if isinstance(error, NearlineError) else repr(error)
            log.info("adapter not in the pool", engine_id=engine_id, digest=answer.digest, reason=reason)
        if engine_id in self._lent:
            self._to_engine(engine_id, answer)
