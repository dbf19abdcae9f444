"""A store in use for long: random loads, evictions, cancellations, killed readers; each byte checked, nothing leaks."""

import gc
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import xxhash

from nearline.checkpoint_store import CheckpointStore, Lease, Manifest
from nearline.protocol.errors import Cancelled, OutOfMemory
from tests.checkpoint_store.checkpoints import wait_for

NUM_WARM_UP, NUM_FRAMES = 50, 24
READER = """
import mmap, os, sys
pool = mmap.mmap(int(sys.argv[1]), 0, prot=mmap.PROT_READ)
sys.stdout.write("mapped\\n"); sys.stdout.flush()
while True:
    sum(pool[::4096])
"""


class Soak:
    """One store and everybody who holds something of it."""

    def __init__(self, store: CheckpointStore, manifests: list[Manifest], seed: int) -> None:
        self.store, self.manifests, self.random = store, manifests, random.Random(seed)
        self.held: list[tuple[Lease, Manifest]] = []
        self.num_checked = self.num_cancelled = self.num_killed = self.num_refused = 0

    def cycle(self) -> None:
        manifest = self.random.choice(self.manifests)
        action = self.random.choices(("load", "cancel", "preload", "evict", "release", "kill"), (6, 3, 2, 3, 4, 1))[0]
        try:
            getattr(self, f"_{action}")(manifest)
        except OutOfMemory:
            self.num_refused += 1
            self._release(manifest)
        self.store.check()

    def _load(self, manifest: Manifest) -> None:
        lease = self.store.acquire(manifest.digest)
        self.held.append((lease, manifest))
        lease.done.result(60)
        self.check_bytes(lease, manifest)

    def _cancel(self, manifest: Manifest) -> None:
        lease = self.store.acquire(manifest.digest)
        lease.release()
        if isinstance(lease.done.exception(60), Cancelled):
            self.num_cancelled += 1

    def _preload(self, manifest: Manifest) -> None:
        done = self.store.preload(manifest.digest)
        assert isinstance(done.exception(60), Cancelled | None)

    def _evict(self, manifest: Manifest) -> None:
        self.store.evict(manifest.digest)

    def _release(self, _manifest: Manifest) -> None:
        if self.held:
            lease, held = self.held.pop(self.random.randrange(len(self.held)))
            self.check_bytes(lease, held)
            lease.release()

    def _kill(self, _manifest: Manifest) -> None:
        """A process that maps the pool dies by kill -9 while it reads."""
        command = [sys.executable, "-c", READER, str(self.store.pool.fd)]
        with subprocess.Popen(command, pass_fds=[self.store.pool.fd], stdout=subprocess.PIPE) as reader:
            assert reader.stdout
            assert reader.stdout.readline() == b"mapped\n"
            reader.kill()
            assert reader.wait() == -9, "it died of the kill, not of SIGBUS"
        self.num_killed += 1

    def check_bytes(self, lease: Lease, manifest: Manifest) -> None:
        """Digest what an engine would see, through a mapping of its own."""
        size, frame_bytes = manifest.chunk_bytes, self.store.pool.layout.frame_bytes
        with mmap.mmap(self.store.pool.fd, 0, prot=mmap.PROT_READ) as pool, memoryview(pool) as view:
            for index, (frame, digest) in enumerate(zip(lease.frames, manifest.chunk_digests, strict=True)):
                count = min(size, manifest.num_bytes - index * size)
                with view[frame * frame_bytes : frame * frame_bytes + count] as chunk:
                    assert xxhash.xxh3_128_hexdigest(chunk) == digest
                self.num_checked += 1


@pytest.mark.parametrize(("seed", "num_cycles"), [(0, 200), (1, 200), pytest.param(2, 10_000, marks=pytest.mark.slow)])
def test_random_cycles_keep_every_byte_and_leak_nothing(
    root: Path, open_store: Callable[..., CheckpointStore], checkpoints: ModuleType, seed: int, num_cycles: int
) -> None:
    manifests = [checkpoints.commit_random(root / "checkpoints", 3 + i, 10 * seed + i) for i in range(7)]
    store = open_store(num_frames=NUM_FRAMES)
    soak, process = Soak(store, manifests, seed), psutil.Process()
    rss, fds, threads = 0, 0, 0
    for number in range(NUM_WARM_UP + num_cycles):
        soak.cycle()
        if number == NUM_WARM_UP:
            gc.collect()
            rss, fds, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    while soak.held:
        soak._release(manifests[0])
    gc.collect()
    assert process.memory_info().rss < rss + NUM_FRAMES * checkpoints.TINY_CHUNK + 4 * 2**20
    assert wait_for(lambda: process.num_fds() <= fds + 1), "what was cancelled while it was read is closed, too"
    assert process.num_threads() <= threads + 1
    for manifest in manifests:
        store.evict(manifest.digest)
    assert wait_for(lambda: store.dram_free_bytes() == store.dram_pool_bytes)
    assert not any(row.is_pinned or row.dram_bytes for row in store.residency())
    assert min(soak.num_checked, soak.num_killed, soak.num_refused) > 0
    assert os.listdir(root / "incoming") == []
