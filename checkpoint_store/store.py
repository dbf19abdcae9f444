"""The checkpoint store of one node: which checkpoints it has on SSD, and leases on them in DRAM.

Thread-safe, no asyncio. This file keeps the catalogue, trust in files and the measures; DRAM is `dram.py`'s.
"""

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
from nearline.checkpoint_store.estimate import Bandwidths, load_s
from nearline.checkpoint_store.lease import Lease, ReadStats
from nearline.checkpoint_store.marker import (
    clear_damage,
    clear_marker,
    read_damage,
    read_marker,
    write_damage,
    write_marker,
)
from nearline.checkpoint_store.pool import DramPool
from nearline.checkpoint_store.probe import DiskProbe
from nearline.checkpoint_store.root import StoreRoot
from nearline.checkpoint_store.types import WEIGHTS_NAME, Manifest
from nearline.checkpoint_store.verify import verify_weights
from nearline.checkpoint_store.weights_file import FileStamp
from nearline.protocol import Bytes, Digest, Residency, Seconds, Tier, TierBandwidth
from nearline.protocol.errors import CheckpointCorrupt, ModelNotFound

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
        self._manifests: dict[Digest, Manifest] = {}
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
        largest = max(manifests, key=lambda m: m.num_bytes, default=None)
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
        """Read a checkpoint from SSD and check every digest; `progress` gets (done, total) bytes.

        Raises CheckpointCorrupt naming the bad chunks; from then on nothing loads it until it is imported again (or a
        later verification finds it right). Instances that hold it in DRAM go on: those bytes were checked.
        """
        manifest, directory = self.manifest(digest), self.directory(digest)
        started_at = time.monotonic()
        try:
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

    # ---- DRAM ----

    def acquire(self, digest: Digest) -> Lease:
        """Pin a checkpoint in DRAM and start reading what is missing; returns at once.

        Raises ModelNotFound, CheckpointCorrupt if a verification found it damaged, or OutOfMemory with the numbers
        when it cannot fit beside what is pinned.
        """
        self._refuse_damaged(digest)
        if self._probe:
            self._probe.interrupt()
        return self._cache.acquire(digest)

    def preload(self, digest: Digest) -> Future[ReadStats]:
        """Read a checkpoint into DRAM behind whatever somebody waits for, and leave it there unpinned.

        Fails with Cancelled when an `acquire` needs its frames. Raises as `acquire`.
        """
        self._refuse_damaged(digest)
        if self._probe:
            self._probe.interrupt()
        return self._cache.preload(digest)

    def evict(self, digest: Digest) -> Bytes:
        """Give a checkpoint's DRAM back unless it is pinned; return the bytes of the frames freed."""
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
            return sum(manifest.num_bytes for manifest in self._manifests.values())

    def ssd_budget_bytes(self) -> Bytes:
        """The configured budget, or what checkpoints use plus what the disk has left."""
        if self._config.ssd_budget_bytes is not None:
            return self._config.ssd_budget_bytes
        return self.ssd_used_bytes() + self._root.disk_free_bytes()

    def ssd_free_bytes(self) -> Bytes:
        """The lesser of what is left of the budget and of the disk."""
        return max(0, min(self.ssd_budget_bytes() - self.ssd_used_bytes(), self._root.disk_free_bytes()))

    def bandwidths(self) -> tuple[TierBandwidth, ...]:
        with self._lock:
            return self._bandwidths.as_tuple()

    def observe_bandwidth(self, tier: Tier, num_bytes: Bytes, seconds: Seconds) -> None:
        """Take a measurement made elsewhere, such as a peer transfer or a device copy."""
        with self._lock:
            self._bandwidths.observe(tier, num_bytes, seconds)

    def load_s(self, digest: Digest) -> Seconds:
        """Estimate the seconds until this checkpoint's bytes would be on the device, asked for now."""
        residency = self._residency(self.manifest(digest))
        queued_bytes = self._cache.queued_bytes()
        with self._lock:
            return load_s(residency, self._bandwidths, queued_bytes)

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
        self._cache.register(manifest, directory / WEIGHTS_NAME, read_marker(directory))

    def _refuse_damaged(self, digest: Digest) -> None:
        """Memory that already holds every byte, checked when it was read, may still be used."""
        damage = read_damage(self._root.directory(digest))
        if damage is not None and self._cache.resident_bytes(digest) < self.manifest(digest).num_bytes:
            raise CheckpointCorrupt(f"a verification found this checkpoint damaged: {damage}")

    def _residency(self, manifest: Manifest) -> Residency:
        in_dram = self._cache.resident_bytes(manifest.digest)
        is_pinned = self._cache.is_pinned(manifest.digest)
        return Residency(manifest.digest, manifest.num_bytes, manifest.num_bytes, in_dram, is_pinned)

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
