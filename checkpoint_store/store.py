"""The checkpoint store of one node: which checkpoints it has on SSD, and leases on them in DRAM.

Thread-safe, no asyncio. This file keeps the catalogue, trust in files and the measures; DRAM is `dram.py`'s.
"""

import contextlib
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import psutil
import structlog

from nearline.checkpoint_store.config import StoreConfig, resolve_pool_frames
from nearline.checkpoint_store.dram import DramCache
from nearline.checkpoint_store.estimate import Bandwidths
from nearline.checkpoint_store.lease import Lease, ReadStats
from nearline.checkpoint_store.marker import (
    clear_damage,
    clear_marker,
    is_evicted,
    mark_evicted,
    read_damage,
    read_marker,
    write_damage,
    write_marker,
)
from nearline.checkpoint_store.pool import DramPool
from nearline.checkpoint_store.probe import DiskProbe
from nearline.checkpoint_store.publish_digest import verify_files
from nearline.checkpoint_store.root import StoreRoot
from nearline.checkpoint_store.ssd import Room, StoredCheckpoint, choose_evictions, free_bytes
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest
from nearline.checkpoint_store.verify import verify_weights
from nearline.checkpoint_store.weights_file import FileStamp
from nearline.protocol import Bytes, CheckpointKind, Digest, Residency, Seconds, Tier, TierBandwidth, split_source
from nearline.protocol.errors import CheckpointCorrupt, ModelNotFound, NotFound

FETCHABLE_SOURCES = ("hub:", "http://", "https://")
log = structlog.get_logger()


class CheckpointStore:
    """Checkpoints of one node, on SSD and in DRAM. Owns the pool, the reading threads and the store directory."""

    def __init__(self, config: StoreConfig) -> None:
        """Take the directory, quarantine what is torn and set up the pool.

        Raises InvalidRequest if another process owns `config.root`.
        """
        self._config = config
        self._root = StoreRoot(config.root)
        self._lock = threading.Lock()
        self._room_lock = threading.RLock()
        self._rooms: list[Room] = []
        self._manifests: dict[Digest, Manifest] = {}
        self._is_remote: set[Digest] = set()
        self._bandwidths = Bandwidths()
        memory = psutil.virtual_memory()
        num_frames = resolve_pool_frames(config, memory.total, memory.available)
        self.pool = DramPool(num_frames, config.frame_bytes, config.touch_ahead_bytes)
        self._cache = DramCache(self.pool, config.max_readers, self._ssd_measured, self._trust_changed)
        manifests = self._root.scan()
        for manifest in manifests:
            if not self._root.was_closed_cleanly:
                clear_marker(self._root.directory(manifest.digest))
            self._register(manifest)
        on_ssd = [manifest for manifest in manifests if manifest.digest not in self._is_remote]
        largest = max(on_ssd, key=lambda m: m.num_bytes, default=None)
        self._probe = (
            DiskProbe(self._root.directory(largest.digest) / WEIGHTS_NAME, largest.num_bytes, self._ssd_measured)
            if largest
            else None
        )
        self._is_closed = False
        log.info(
            "store open",
            root=str(config.root),
            num_checkpoints=len(manifests),
            pool_bytes=self.pool.num_bytes,
            was_closed_cleanly=self._root.was_closed_cleanly,
        )

    # ---- the catalogue ----

    def checkpoints(self) -> list[Manifest]:
        """List the committed checkpoints, in order of digest."""
        with self._lock:
            return [manifest for _, manifest in sorted(self._manifests.items())]

    def manifest(self, digest: Digest) -> Manifest:
        """Return a checkpoint's manifest. Raises ModelNotFound if this node does not have it."""
        with self._lock:
            if digest not in self._manifests:
                raise ModelNotFound(f"checkpoint {digest} is not in this node's store; import it first")
            return self._manifests[digest]

    def directory(self, digest: Digest) -> Path:
        """Return a checkpoint's directory. Raises ModelNotFound if this node does not have it."""
        self.manifest(digest)
        return self._root.directory(digest)

    def adopt(self, digest: Digest) -> Manifest:
        """Take in a checkpoint that an import has just committed; known already, nothing changes.

        Raises ModelNotFound if its directory is absent, CheckpointCorrupt if it is torn.
        """
        with self._lock:
            manifest = self._root.read(digest)
            self._register(manifest)
        return manifest

    def delete(self, digest: Digest) -> None:
        """Forget a checkpoint: new acquires fail at once, its bytes go when the last lease does.

        Raises ModelNotFound if this node does not have it.
        """
        self.manifest(digest)
        with self._lock:
            self._manifests.pop(digest, None)
            is_gone = self._cache.forget(digest, on_gone=lambda: self._remove(digest))
        if is_gone:
            self._remove(digest)

    def verify(self, digest: Digest, progress: Callable[[Bytes, Bytes], None] | None = None) -> ReadStats:
        """Read a checkpoint from SSD and check every chunk and file; `progress` gets (done, total) bytes.

        Raises CheckpointCorrupt naming the bad chunks or the file; from then on nothing loads it until it is imported
        again (or a later verification finds it right). Instances that hold it in DRAM go on: those bytes were checked.
        """
        manifest, directory = self.manifest(digest), self.directory(digest)
        self._refuse_remote(digest)
        started_at = time.monotonic()
        try:
            verify_files(directory, manifest)
            stamp = verify_weights(directory / WEIGHTS_NAME, manifest, progress)
        except CheckpointCorrupt as error:
            self._cache.trust(digest, None)
            self._trust_changed(digest, None)
            write_damage(directory, error.message)
            raise
        clear_damage(directory)
        self._cache.trust(digest, stamp)
        self._trust_changed(digest, stamp)
        return ReadStats(time.monotonic() - started_at, manifest.num_bytes, Tier.SSD)

    # ---- SSD ----

    def make_room(self, num_bytes: Bytes) -> tuple[Digest, ...]:
        """Evict from SSD what its source can give back until `num_bytes` are free; return what went.

        Raises StorageFull with the numbers and what else would have to go; then nothing has gone.
        """
        stored = [self._stored(manifest) for manifest in self.checkpoints() if not self.is_remote(manifest.digest)]
        chosen = choose_evictions(stored, num_bytes, self.ssd_free_bytes(), self.ssd_budget_bytes())
        gone = tuple(digest for digest in chosen if self._evict_from_ssd(digest))
        if len(gone) < len(chosen) and self.ssd_free_bytes() < num_bytes:  # one came into use meanwhile
            return gone + self.make_room(num_bytes)
        return gone

    def reserve(self, num_bytes: Bytes) -> Room:
        """Promise an import place on SSD until `give_up`, evicting as `make_room` does; no byte is promised twice.

        Raises as `make_room`.
        """
        with self._room_lock:
            self.make_room(num_bytes)
            room = Room(num_bytes)
            self._rooms.append(room)
        return room

    def give_up(self, room: Room) -> None:
        """End a promise: the import is over, and what it brought is counted as a checkpoint. Idempotent.

        Never waits for a `reserve` that makes room: one event loop calls this.
        """
        with contextlib.suppress(ValueError):
            self._rooms.remove(room)

    def is_remote(self, digest: Digest) -> bool:
        """True when the weights are not here but can be fetched from their source again: import it, then acquire."""
        with self._lock:
            return digest in self._is_remote

    # ---- DRAM ----

    def acquire(self, digest: Digest, may_stream: bool = False) -> Lease:
        """Pin a checkpoint in DRAM and start reading what is missing; returns at once.

        `may_stream`: one that the whole pool cannot hold gets a lease without frames (`Lease.is_streamed`), which
        keeps its file while the holder reads it. Raises ModelNotFound; NotFound when it was evicted from SSD (see
        `is_remote`); CheckpointCorrupt if a verification found it damaged; OutOfMemory with the numbers when it cannot
        fit beside what is pinned.
        """
        self._refuse_unreadable(digest)
        if self._probe:
            self._probe.interrupt()
        lease = self._cache.acquire(digest, may_stream)
        if self.is_remote(digest):  # it went between the question and the pin
            lease.release()
            self._refuse_remote(digest)
        return lease

    def acquire_resident(self, digest: Digest) -> Lease | None:
        """Pin a checkpoint that is in DRAM as a whole. None: it is not; `acquire` it. Never waits for anything."""
        return self._cache.acquire_resident(digest)

    def preload(self, digest: Digest) -> Future[ReadStats]:
        """Read a checkpoint into DRAM behind whatever somebody waits for, and leave it there unpinned.

        Fails with Cancelled when an `acquire` needs its frames. Raises as `acquire`.
        """
        self._refuse_unreadable(digest)
        if self._probe:
            self._probe.interrupt()
        return self._cache.preload(digest)

    def evict(self, digest: Digest) -> Bytes:
        """Give a checkpoint's DRAM back unless it is pinned; return the bytes of the places freed."""
        return self._cache.evict(digest)

    def residency(self) -> tuple[Residency, ...]:
        """Tell how much of each checkpoint is where, in order of digest."""
        return tuple(self._residency(manifest) for manifest in self.checkpoints())

    # ---- measures ----

    @property
    def dram_pool_bytes(self) -> Bytes:
        return self.pool.num_bytes

    def dram_free_bytes(self) -> Bytes:
        """Bytes of frames that hold nothing; what is resident but not pinned can be evicted on top."""
        return self._cache.free_bytes()

    def ssd_used_bytes(self) -> Bytes:
        with self._lock:
            return sum(m.num_bytes for digest, m in self._manifests.items() if digest not in self._is_remote)

    def ssd_budget_bytes(self) -> Bytes:
        """The configured budget, or what checkpoints use plus what the disk has left."""
        if self._config.ssd_budget_bytes is not None:
            return self._config.ssd_budget_bytes
        return self.ssd_used_bytes() + self._root.disk_free_bytes()

    def ssd_free_bytes(self) -> Bytes:
        """The lesser of what is left of the budget and of the disk, less what imports under way were promised."""
        budget_bytes = self._config.ssd_budget_bytes
        budget_left = None if budget_bytes is None else budget_bytes - self.ssd_used_bytes()
        return free_bytes(self._root.disk_free_bytes(), budget_left, list(self._rooms))

    def bandwidths(self) -> tuple[TierBandwidth, ...]:
        with self._lock:
            return self._bandwidths.as_tuple()

    def observe_bandwidth(self, tier: Tier, num_bytes: Bytes, seconds: Seconds) -> None:
        """Take a measurement made elsewhere, such as a peer transfer or a device copy."""
        with self._lock:
            self._bandwidths.observe(tier, num_bytes, seconds)

    def check(self) -> None:
        """Assert the invariants of the store; tests and an idle agent call it."""
        self._cache.check()

    def close(self) -> None:
        """Stop reading, release the pool and mark the directory closed. Open leases fail; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._probe:
            self._probe.join()
        self._cache.close()
        self.pool.close()
        self._root.close()

    # ---- inside ----

    def _register(self, manifest: Manifest) -> None:
        directory = self._root.directory(manifest.digest)
        self._manifests[manifest.digest] = manifest
        if is_evicted(directory):
            self._is_remote.add(manifest.digest)
        else:
            self._is_remote.discard(manifest.digest)
        self._cache.register(manifest, directory / WEIGHTS_NAME, read_marker(directory))

    def _refuse_unreadable(self, digest: Digest) -> None:
        """Memory that already holds every byte, checked when it was read, may still be used."""
        self._refuse_remote(digest)
        damage = read_damage(self._root.directory(digest))
        if damage is not None and self._cache.resident_bytes(digest) < self.manifest(digest).num_bytes:
            raise CheckpointCorrupt(f"a verification found this checkpoint damaged: {damage}")

    def _refuse_remote(self, digest: Digest) -> None:
        if self.is_remote(digest):
            source = self.manifest(digest).info.source
            raise NotFound(f"checkpoint {digest} was evicted from SSD; it comes back from {source} when it is needed")

    def _evict_from_ssd(self, digest: Digest) -> bool:
        """Give a checkpoint's weights up unless somebody uses them; its manifest and small files stay."""
        directory = self._root.directory(digest)
        with self._lock:
            if digest not in self._manifests or not self._cache.withdraw(digest):
                return False
            mark_evicted(directory)
            clear_marker(directory)
            (directory / WEIGHTS_NAME).unlink(missing_ok=True)
            self._is_remote.add(digest)
        log.info("checkpoint evicted from SSD", digest=digest, num_bytes=self.manifest(digest).num_bytes)
        return True

    def _stored(self, manifest: Manifest) -> StoredCheckpoint:
        digest, info = manifest.digest, manifest.info
        fetchable = info.kind is CheckpointKind.MODEL and split_source(info.source)[1].startswith(FETCHABLE_SOURCES)
        in_use = self._cache.is_pinned(digest)
        return StoredCheckpoint(digest, manifest.num_bytes, info.source, fetchable, in_use, self._cache.value(digest))

    def _residency(self, manifest: Manifest) -> Residency:
        digest = manifest.digest
        in_dram, is_pinned = self._cache.resident_bytes(digest), self._cache.is_pinned(digest)
        is_remote = self.is_remote(digest)
        on_ssd = 0 if is_remote else manifest.num_bytes
        return Residency(digest, manifest.num_bytes, on_ssd, in_dram, is_pinned, is_fetchable=is_remote)

    def _remove(self, digest: Digest) -> None:
        with self._lock:
            if digest in self._manifests:  # imported again meanwhile
                return
            aside = self._root.set_aside(digest)
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
            log.info("checkpoint deleted", digest=digest)

    def _ssd_measured(self, num_bytes: Bytes, seconds: Seconds) -> None:
        self.observe_bandwidth(Tier.SSD, num_bytes, seconds)

    def _trust_changed(self, digest: Digest, stamp: FileStamp | None) -> None:
        directory = self._root.directory(digest)
        if stamp is None:
            clear_marker(directory)
        else:
            write_marker(directory, stamp)
