"""The store's slow side in threads: pins held for instances, and the errands that read or remove bytes."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import structlog

from nearline.checkpoint_store import CheckpointStore, Lease, ReadStats
from nearline.node_agent import events as ev
from nearline.protocol import Digest, InstanceId
from nearline.protocol.errors import Cancelled, ErrorInfo, NearlineError, NotFound

log = structlog.get_logger()


class Leases:
    """Owns the leases of instances. Outcomes are posted as events, in the loop that made this object."""

    def __init__(
        self,
        store: CheckpointStore,
        post: Callable[[ev.NodeEvent], None],
        fetch: Callable[[Digest, Callable[[], None]], Awaitable[None]],
    ) -> None:
        """`fetch` brings back what was evicted from SSD, and calls whenever it has come further."""
        self._store = store
        self._fetch = fetch
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._held: dict[InstanceId, Lease | None] = {}
        self._acquiring: set[asyncio.Task[Lease]] = set()
        self._fetching: dict[InstanceId, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="nearline-store")

    def acquire(self, instance_id: InstanceId, digest: Digest, may_stream: bool = False) -> None:
        """Pin a checkpoint for an instance; LeaseAcquired or LeaseRefused, later LeaseFilled or LeaseBroken follow."""
        self._held[instance_id] = None
        future = asyncio.ensure_future(self._acquire(instance_id, digest, may_stream))
        self._acquiring.add(future)
        future.add_done_callback(self._acquiring.discard)
        future.add_done_callback(lambda done: self._on_acquired(instance_id, done))

    def release(self, instance_id: InstanceId) -> None:
        """Unpin; a pin that is still being made is given back when it is there, a fetch is not waited for any more."""
        if instance_id in self._fetching:
            self._fetching[instance_id].cancel()
        lease = self._held.pop(instance_id, None)
        if lease:
            lease.release()

    def release_when_read(self, instance_id: InstanceId) -> None:
        """Unpin as soon as the reading has ended, which somebody who has all bytes may know a little earlier; of a
        streamed checkpoint nobody else knows it."""
        lease = self._held.get(instance_id)

        def let_go() -> None:
            if self._held.get(instance_id) is lease:
                self.release(instance_id)

        def when_read(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: the agent is going
                self._loop.call_soon_threadsafe(let_go)

        if lease:
            lease.done.add_done_callback(when_read)
            lease.finish()

    def lease(self, instance_id: InstanceId) -> Lease:
        """Give an acquired lease: its frames and its directory stay, whatever was deleted meanwhile."""
        lease = self._held[instance_id]
        assert lease is not None, f"{instance_id} is bound before its lease is acquired"
        return lease

    def run(self, what: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Do an errand in a thread; its failure is logged, nobody waits for it."""
        future = self._loop.run_in_executor(self._threads, function, *arguments)
        future.add_done_callback(lambda done: _log_failure(what, done))

    def close(self) -> None:
        """Release everything. Bound processes must be gone."""
        for future in self._acquiring:
            future.cancel()
        self._threads.shutdown(cancel_futures=True)
        for instance_id in list(self._held):
            self.release(instance_id)

    async def _acquire(self, instance_id: InstanceId, digest: Digest, may_stream: bool) -> Lease:
        while True:
            if self._store.is_remote(digest):
                await self._bring(instance_id, digest)
            try:
                return await self._loop.run_in_executor(self._threads, self._store.acquire, digest, may_stream)
            except NotFound:
                if not self._store.is_remote(digest):  # else it was evicted again before it was pinned
                    raise

    async def _bring(self, instance_id: InstanceId, digest: Digest) -> None:
        if instance_id not in self._held:
            raise Cancelled("nobody waits for these bytes any more")
        moved = partial(self._post, ev.BytesMoved(instance_id))
        fetching = self._fetching[instance_id] = asyncio.ensure_future(self._fetch(digest, moved))
        try:
            await fetching
        finally:
            del self._fetching[instance_id]

    def _on_acquired(self, instance_id: InstanceId, done: "asyncio.Future[Lease]") -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            if not isinstance(error, NearlineError):
                log.error("a checkpoint could not be pinned", instance_id=instance_id, exc_info=error)
            if self._held.pop(instance_id, "gone") != "gone":
                self._post(ev.LeaseRefused(instance_id, ErrorInfo.of(error)))
            return
        lease = done.result()
        if instance_id not in self._held:
            lease.release()
            return
        self._held[instance_id] = lease
        self._post(ev.LeaseAcquired(instance_id))
        lease.done.add_done_callback(lambda read: self._on_read(instance_id, read))

    def _on_read(self, instance_id: InstanceId, read: "Future[ReadStats]") -> None:
        """Runs in a reading thread, or at once when all was in DRAM."""
        error = read.exception()
        if error is None:
            stats = read.result()
            event: ev.NodeEvent = ev.LeaseFilled(instance_id, stats.seconds, stats.num_bytes, stats.tier)
        else:
            event = ev.LeaseBroken(instance_id, ErrorInfo.of(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended: the agent is going
            self._loop.call_soon_threadsafe(self._post, event)


def _log_failure(what: str, done: "asyncio.Future[Any]") -> None:
    error = None if done.cancelled() else done.exception()
    if isinstance(error, NearlineError):
        log.warning(f"{what} failed", error=error.message, code=error.code)
    elif error is not None:
        log.error(f"{what} failed", exc_info=error)
