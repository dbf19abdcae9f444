"""Checkpoints in DRAM: leases, the reads they need and the frames they hold.

Thread-safe. One lock guards the mind (`tiers.py`) and the book of leases; nothing is read, hashed or called back under
it. Hands: which chunks go is the mind's decision, how bytes come is the reader's.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from nearline.checkpoint_store.lease import Lease, ReadStats
from nearline.checkpoint_store.pool import DramPool
from nearline.checkpoint_store.reader import ChunkRead, ChunkReader, ReadJob, Window
from nearline.checkpoint_store.tiers import Admission, DramTier
from nearline.checkpoint_store.types import (
    DATA_ALIGNMENT,
    FRAME_FAILED,
    FRAME_READING,
    FRAME_READY,
    Manifest,
)
from nearline.checkpoint_store.weights_file import FileStamp
from nearline.protocol import Bytes, CheckpointKind, Digest, Extent, Seconds, Tier
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, ModelNotFound, NearlineError, OutOfMemory

_DRAIN_TIMEOUT_S: Seconds = 10.0
"""How long an acquire that does not fit waits for cancelled reads to end: they are about to free their frames. A busy
disk takes seconds for the chunks it has begun."""
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Waiting:
    """A lease whose chunks are not all there."""

    lease: Lease
    started_at: Seconds
    pending: set[int]
    num_bytes: Bytes


@dataclass(slots=True)
class _Entry:
    """One known checkpoint and who uses it now. `verified` are chunks found right under `verified_stamp`."""

    manifest: Manifest
    path: Path
    trusted_stamp: FileStamp | None
    leases: list[Lease] = field(default_factory=list)
    waiting: list[_Waiting] = field(default_factory=list)
    jobs: list[ReadJob] = field(default_factory=list)
    verified_stamp: FileStamp | None = None
    verified: set[int] = field(default_factory=set)
    failure: CheckpointCorrupt | None = None
    on_gone: Callable[[], None] | None = None

    @property
    def may_pack(self) -> bool:
        """Engines map a model's frames, but read an adapter: it may lie anywhere."""
        return self.manifest.info.kind is CheckpointKind.ADAPTER

    def num_bytes_of(self, index: int) -> Bytes:
        return min(self.manifest.chunk_bytes, self.manifest.num_bytes - index * self.manifest.chunk_bytes)


Settled = list[tuple[_Waiting, ReadStats | NearlineError]]


class DramCache:
    """Leases on checkpoints in the pool. `on_trust(digest, stamp)` reports that a file's digests were all found right,
    or with None that they were not; like every callback it runs without the lock."""

    def __init__(
        self,
        pool: DramPool,
        max_readers: int,
        on_window: Window,
        on_trust: Callable[[Digest, FileStamp | None], None],
    ) -> None:
        self.pool = pool
        self._tier = DramTier(pool.layout.num_frames, pool.layout.frame_bytes)
        self._changed = threading.Condition()
        self._entries: dict[Digest, _Entry] = {}
        self._preloads: list[Lease] = []
        self._on_trust = on_trust
        self._reader = ChunkReader(pool, max_readers, self._chunk_done, on_window)

    def register(self, manifest: Manifest, path: Path, trusted_stamp: FileStamp | None) -> None:
        """Make a checkpoint known; known already, it is only kept from being forgotten."""
        with self._changed:
            entry = self._entries.get(manifest.digest)
            if entry is not None:
                entry.on_gone = None
                return
            entry = self._entries[manifest.digest] = _Entry(manifest, path, trusted_stamp)
            sizes = manifest.num_bytes, manifest.chunk_bytes
            self._tier.register(manifest.digest, *sizes, may_pack=entry.may_pack)

    def forget(self, digest: Digest, on_gone: Callable[[], None]) -> bool:
        """Forget a checkpoint now if nothing uses it (True); else when the last lease and read end, and call `on_gone`
        then."""
        with self._changed:
            entry = self._entries[digest]
            entry.on_gone = on_gone
            return self._bury(entry) is not None

    def trust(self, digest: Digest, stamp: FileStamp | None) -> None:
        """Digests were checked elsewhere: reads of a file with this stamp need no check (None: all need it)."""
        with self._changed:
            if digest in self._entries:
                self._entries[digest].trusted_stamp = stamp

    def acquire(self, digest: Digest, may_stream: bool = False) -> Lease:
        """Pin a checkpoint and start reading what is missing. Preloads under way make room if nothing else can, but not
        for a packed one.

        `may_stream`: a checkpoint larger than the pool gets a streamed lease. Raises ModelNotFound or OutOfMemory.
        """
        try:
            return self._acquire(digest, is_urgent=True, may_stream=may_stream)
        except OutOfMemory:
            with self._changed:
                is_packed = digest in self._entries and self._tier.is_packed(digest)
                preloads = [] if is_packed else list(self._preloads)
            if not preloads:
                raise
        for lease in preloads:
            lease.release()
        return self._acquire(digest, is_urgent=True)

    def acquire_resident(self, digest: Digest) -> Lease | None:
        """Pin a checkpoint if every byte of it is there; never waits. None: it is not, or not known."""
        with self._changed:
            entry = self._entries.get(digest)
            if entry is None or entry.on_gone or self._tier.resident_bytes(digest) < entry.manifest.num_bytes:
                return None
            return self._acquire(digest, is_urgent=True)

    def preload(self, digest: Digest) -> Future[ReadStats]:
        """Read a checkpoint behind whatever somebody waits for, and let it go when it is there. Raises as `acquire`."""
        lease = self._acquire(digest, is_urgent=False)
        with self._changed:
            self._preloads.append(lease)
        lease.done.add_done_callback(lambda _: lease.release())
        return lease.done

    def evict(self, digest: Digest) -> Bytes:
        """Free an unpinned checkpoint's places; return their bytes."""
        with self._changed:
            place_bytes = self._entry(digest).manifest.num_bytes
            if not self._tier.is_packed(digest):
                place_bytes = self.pool.layout.frame_bytes
            return self._tier.evict(digest) * place_bytes

    def withdraw(self, digest: Digest) -> bool:
        """Free an unused checkpoint's frames, because its file is about to go; False while anybody uses it."""
        with self._changed:
            entry = self._entry(digest)
            if entry.leases or self._tier.pending(digest):
                return False
            self._tier.evict(digest)
            entry.trusted_stamp = None
            return True

    def resident_bytes(self, digest: Digest) -> Bytes:
        with self._changed:
            return self._tier.resident_bytes(digest) if digest in self._entries else 0

    def is_pinned(self, digest: Digest) -> bool:
        with self._changed:
            return digest in self._entries and self._tier.is_pinned(digest)

    def value(self, digest: Digest) -> float:
        """Tell how much a checkpoint is worth to keep, by how often it was used of late."""
        with self._changed:
            return self._tier.value(digest, time.monotonic()) if digest in self._entries else 0.0

    def free_bytes(self) -> Bytes:
        """Bytes of frames that hold nothing."""
        with self._changed:
            return self._tier.num_free * self.pool.layout.frame_bytes

    def queued_bytes(self) -> Bytes:
        return self._reader.queued_bytes()

    def check(self) -> None:
        """Assert the invariants of the mind and of the book of leases."""
        with self._changed:
            self._tier.check()
            for digest, entry in self._entries.items():
                assert self._tier.is_pinned(digest) == bool(entry.leases)

    def close(self) -> None:
        """End the reading threads; leases that still wait fail with Cancelled. The pool stays open."""
        self._reader.close()
        with self._changed:
            waiting = [w for entry in self._entries.values() for w in entry.waiting]
            for entry in self._entries.values():
                entry.waiting.clear()
        _settle([(w, Cancelled(f"the store was closed while reading {w.lease.digest}")) for w in waiting])

    def _acquire(self, digest: Digest, is_urgent: bool, may_stream: bool = False) -> Lease:
        now = time.monotonic()
        with self._changed:
            entry = self._entry(digest)
            admission = self._pin(entry, now, may_stream)
            extents = self._extents(entry, admission)
            lease = Lease(digest, entry.path.parent, admission.frames, extents, self._release, self._finish)
            entry.leases.append(lease)
            if lease.is_streamed:
                entry.waiting.append(_Waiting(lease, now, set(), entry.manifest.num_bytes))
            pending = self._tier.pending(digest)
            if admission.to_read:
                self._submit(entry, admission, extents, is_urgent)
            if pending and is_urgent:
                for job in entry.jobs:
                    self._reader.promote(job)
            failure = entry.failure if self._tier.has_failed(digest) else None
            if pending and failure is None:
                num_bytes = sum(map(entry.num_bytes_of, pending))
                entry.waiting.append(_Waiting(lease, now, set(pending), num_bytes))
        if admission.to_read or lease.is_streamed:
            log.info("checkpoint pinned", digest=digest, reason=admission.reason)
        if failure is not None:
            lease.done.set_exception(failure)
        elif not pending and not lease.is_streamed:
            lease.done.set_result(ReadStats(0.0, 0, Tier.DRAM))
        return lease

    # ---- under the lock ----

    def _entry(self, digest: Digest) -> _Entry:
        entry = self._entries.get(digest)
        if entry is None or entry.on_gone is not None:
            raise ModelNotFound(f"checkpoint {digest} is not in this node's store; import it first")
        return entry

    def _pin(self, entry: _Entry, now: Seconds, may_stream: bool) -> Admission:
        frame_bytes, chunk_bytes = self.pool.layout.frame_bytes, entry.manifest.chunk_bytes
        if chunk_bytes > frame_bytes or chunk_bytes % DATA_ALIGNMENT:
            raise OutOfMemory(
                f"checkpoint {entry.manifest.digest} has chunks of {chunk_bytes} bytes, pool frames hold "
                f"{frame_bytes}; set frame_bytes to a multiple of 4096 that holds a chunk"
            )
        while True:
            try:
                return self._tier.pin(entry.manifest.digest, now, may_stream)
            except OutOfMemory:
                deadline = now + _DRAIN_TIMEOUT_S - time.monotonic()
                is_packed = self._tier.is_packed(entry.manifest.digest)  # it can be read elsewhere: not worth a wait
                if is_packed or not self._tier.num_draining or not self._changed.wait(deadline if deadline > 0 else 0):
                    raise
                self._entry(entry.manifest.digest)

    def _extents(self, entry: _Entry, admission: Admission) -> tuple[Extent, ...]:
        if admission.extent:
            return (admission.extent,)
        frame_bytes = self.pool.layout.frame_bytes
        return tuple(Extent(f * frame_bytes, entry.num_bytes_of(i)) for i, f in enumerate(admission.frames))

    def _submit(self, entry: _Entry, admission: Admission, extents: tuple[Extent, ...], is_urgent: bool) -> None:
        entry.failure = None
        manifest = entry.manifest
        chunks = []
        for index in admission.to_read:
            offset, digest = index * manifest.chunk_bytes, manifest.chunk_digests[index]
            chunk = ChunkRead(index, extents[index].offset, offset, entry.num_bytes_of(index), digest)
            self._set_ready(chunk, FRAME_READING)
            chunks.append(chunk)
        job = ReadJob(manifest.digest, entry.path, manifest.num_bytes, chunks, entry.trusted_stamp, is_urgent)
        entry.jobs = [j for j in entry.jobs if j.is_open] + [job]
        last = max(extent.offset for extent in extents) // self.pool.layout.frame_bytes
        self.pool.expect_use(last + 1)
        self._reader.submit(job)

    def _set_ready(self, chunk: ChunkRead, value: int) -> None:
        """Publish a chunk's state to those who map its frame. Nobody maps a pack, and its chunks differ in state."""
        frame = chunk.at // self.pool.layout.frame_bytes
        if not self._tier.is_pack(frame):
            self.pool.set_ready(frame, value)

    def _cancel_jobs(self, entry: _Entry) -> list[ChunkRead]:
        dropped = [chunk for job in entry.jobs for chunk in self._reader.cancel(job)]
        entry.jobs = []
        return dropped

    def _bury(self, entry: _Entry) -> Callable[[], None] | None:
        if entry.on_gone is None or not self._tier.forget(entry.manifest.digest):
            return None
        del self._entries[entry.manifest.digest]
        return entry.on_gone

    def _note_verified(self, entry: _Entry, job: ReadJob, index: int) -> FileStamp | None:
        if not job.is_verifying or job.stamp is None:
            return None
        if entry.verified_stamp != job.stamp:
            entry.verified_stamp, entry.verified = job.stamp, set()
        entry.verified.add(index)
        if len(entry.verified) < len(entry.manifest.chunk_digests):
            return None
        entry.trusted_stamp = job.stamp
        return job.stamp

    # ---- called by leases and reading threads ----

    def _release(self, lease: Lease) -> None:
        settled: Settled = []
        with self._changed:
            entry = self._entries.get(lease.digest)
            if entry is None or lease not in entry.leases:
                return
            entry.leases.remove(lease)
            if lease in self._preloads:
                self._preloads.remove(lease)
            for waiting in [w for w in entry.waiting if w.lease is lease]:
                entry.waiting.remove(waiting)
                settled.append((waiting, Cancelled(f"the lease on {lease.digest} was released while it was read")))
            if self._tier.unpin(lease.digest):
                self._tier.drop(lease.digest, [chunk.index for chunk in self._cancel_jobs(entry)])
            gone = self._bury(entry)
            self._changed.notify_all()
        _settle(settled)
        if gone:
            gone()

    def _finish(self, lease: Lease) -> None:
        settled: Settled = []
        with self._changed:
            entry = self._entries.get(lease.digest)
            if entry is None or not lease.is_streamed:
                return
            for waiting in [w for w in entry.waiting if w.lease is lease]:
                entry.waiting.remove(waiting)
                elapsed_s = time.monotonic() - waiting.started_at
                settled.append((waiting, ReadStats(elapsed_s, waiting.num_bytes, Tier.SSD)))
        _settle(settled)

    def _chunk_done(self, job: ReadJob, chunk: ChunkRead, error: CheckpointCorrupt | None) -> None:
        newly_trusted = None
        with self._changed:
            entry = self._entries[job.digest]
            if error is None:
                self._set_ready(chunk, FRAME_READY)
                self._tier.finish(job.digest, chunk.index)
                newly_trusted = self._note_verified(entry, job, chunk.index)
                settled = _arrived(entry, chunk.index)
            else:
                settled = self._chunk_failed(entry, chunk, error)
            gone = self._bury(entry)
            self._changed.notify_all()
        if error is not None:
            log.error("checkpoint cannot be loaded", digest=job.digest, error=error.message)
        if error is not None or newly_trusted is not None:
            self._on_trust(job.digest, newly_trusted)
        _settle(settled)
        if gone:
            gone()

    def _chunk_failed(self, entry: _Entry, chunk: ChunkRead, error: CheckpointCorrupt) -> Settled:
        # The rest of the file is not worth reading: every chunk still queued fails with this one.
        failed = [chunk, *self._cancel_jobs(entry)]
        for one in failed:
            self._set_ready(one, FRAME_FAILED)
        entry.trusted_stamp, entry.failure = None, error
        entry.verified.clear()
        self._tier.fail(entry.manifest.digest, [one.index for one in failed])
        settled: Settled = [(waiting, error) for waiting in entry.waiting]
        entry.waiting.clear()
        return settled


def _arrived(entry: _Entry, index: int) -> Settled:
    settled: Settled = []
    for waiting in list(entry.waiting):
        waiting.pending.discard(index)
        if not waiting.pending:
            entry.waiting.remove(waiting)
            elapsed_s = time.monotonic() - waiting.started_at
            settled.append((waiting, ReadStats(elapsed_s, waiting.num_bytes, Tier.SSD)))
    return settled


def _settle(settled: Settled) -> None:
    for waiting, outcome in settled:
        if isinstance(outcome, ReadStats):
            waiting.lease.done.set_result(outcome)
        else:
            waiting.lease.done.set_exception(outcome)
