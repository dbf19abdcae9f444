"""Reading threads: in order, each chunk reported once, urgent first, cancellable, digests checked."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nearline.checkpoint_store import Manifest
from nearline.checkpoint_store.pool import DramPool
from nearline.checkpoint_store.reader import ChunkRead, ChunkReader, ReadJob
from nearline.checkpoint_store.weights_file import FileStamp
from nearline.protocol.errors import CheckpointCorrupt


class Recorder:
    """Collects what a reader reports; `hold` makes every report wait, so that threads stay busy."""

    def __init__(self) -> None:
        self.chunks: list[tuple[ReadJob, ChunkRead, CheckpointCorrupt | None]] = []
        self.windows: list[tuple[int, float]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.changed = threading.Condition()

    def on_chunk(self, job: ReadJob, chunk: ChunkRead, error: CheckpointCorrupt | None) -> None:
        with self.changed:
            self.chunks.append((job, chunk, error))
            self.changed.notify_all()
        assert self.hold.wait(60)

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.chunks) >= count, 60)

    @property
    def indices(self) -> list[int]:
        return [chunk.index for _, chunk, _ in self.chunks]


@pytest.fixture
def pool(checkpoints: ModuleType) -> Iterator[DramPool]:
    pool = DramPool(64, checkpoints.TINY_CHUNK)
    yield pool
    pool.close()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def reader(pool: DramPool, recorder: Recorder) -> Iterator[ChunkReader]:
    reader = ChunkReader(pool, 4, recorder.on_chunk, lambda b, s: recorder.windows.append((b, s)))
    yield reader
    recorder.hold.set()
    reader.close()


def job_for(directory: Path, manifest: Manifest, first_frame: int = 0, is_urgent: bool = True,
            trusted: FileStamp | None = None) -> ReadJob:  # fmt: skip
    size = manifest.chunk_bytes
    chunks = [
        ChunkRead(i, (first_frame + i) * size, i * size, min(size, manifest.num_bytes - i * size), digest)
        for i, digest in enumerate(manifest.chunk_digests)
    ]
    path = directory / manifest.digest / "model.safetensors"
    return ReadJob(manifest.digest, path, manifest.num_bytes, chunks, trusted, is_urgent)


def stamp_of(directory: Path, manifest: Manifest) -> FileStamp:
    status = (directory / manifest.digest / "model.safetensors").stat()
    return FileStamp(status.st_size, status.st_mtime_ns, status.st_ino)


def trusted_job(directory: Path, manifest: Manifest, **options: Any) -> ReadJob:
    """A job without anything to check: as many chunks are under way as there are readers."""
    return job_for(directory, manifest, trusted=stamp_of(directory, manifest), **options)


def test_frames_hold_the_file_and_every_chunk_is_reported_once(
    tmp_path: Path, pool: DramPool, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(tmp_path, 40, seed=1)
    reader.submit(job_for(tmp_path, manifest))
    recorder.wait(40)
    blob = (tmp_path / manifest.digest / "model.safetensors").read_bytes()
    assert b"".join(bytes(pool.frame(i)) for i in range(40))[: len(blob)] == blob
    assert sorted(recorder.indices) == list(range(40))
    assert [error for _, _, error in recorder.chunks if error] == []


def test_chunks_finish_in_order_give_or_take_the_number_of_readers(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    reader.submit(job_for(tmp_path, checkpoints.commit_random(tmp_path, 40, seed=1)))
    recorder.wait(40)
    displacements = sorted(abs(place - index) for place, index in enumerate(recorder.indices))
    assert displacements[20] <= 4  # the median: a thread may be descheduled while the others go on


def test_what_somebody_waits_for_is_read_before_a_preload(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    background, urgent = (checkpoints.commit_random(tmp_path, 10, seed) for seed in (1, 2))
    recorder.hold.clear()
    reader.submit(trusted_job(tmp_path, background, is_urgent=False))
    recorder.wait(4)  # every reader holds a chunk of the preload
    reader.submit(trusted_job(tmp_path, urgent, first_frame=20))
    recorder.hold.set()
    recorder.wait(20)
    assert {job.digest for job, _, _ in recorder.chunks[4:10]} == {urgent.digest}


def test_a_preload_that_somebody_starts_waiting_for_moves_up(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    first, second = (checkpoints.commit_random(tmp_path, 10, seed) for seed in (1, 2))
    recorder.hold.clear()
    reader.submit(trusted_job(tmp_path, first, is_urgent=False))
    waited_for = trusted_job(tmp_path, second, first_frame=20, is_urgent=False)
    reader.submit(waited_for)
    recorder.wait(4)
    reader.promote(waited_for)
    recorder.hold.set()
    recorder.wait(20)
    assert {job.digest for job, _, _ in recorder.chunks[4:10]} == {second.digest}


def order_of_reading(
    pool: DramPool, recorder: Recorder, directory: Path, first: Manifest, others: list[Manifest]
) -> list[int]:
    """Tell which of them each chunk read by a single reader was of, in order. The others come while it holds the first
    chunk of the first, whose number is 0."""
    manifests = [first, *others]
    reader = ChunkReader(pool, 1, recorder.on_chunk, lambda b, s: None)
    recorder.hold.clear()
    reader.submit(trusted_job(directory, first))
    recorder.wait(1)
    for number, manifest in enumerate(others):
        reader.submit(trusted_job(directory, manifest, first_frame=32 + number))
    recorder.hold.set()
    recorder.wait(sum(len(manifest.chunk_digests) for manifest in manifests))
    reader.close()
    digests = [manifest.digest for manifest in manifests]
    return [digests.index(job.digest) for job, _, _ in recorder.chunks]


def test_an_adapter_does_not_wait_for_a_whole_model(
    tmp_path: Path, pool: DramPool, recorder: Recorder, checkpoints: ModuleType
) -> None:
    sizes = 30, 1, 3
    model, small, large = (checkpoints.commit_random(tmp_path, size, seed) for seed, size in enumerate(sizes))
    order = order_of_reading(pool, recorder, tmp_path, model, [large, small])
    assert order == [0, 2, 0, 1, 0, 1, 0, 1] + [0] * 26


def test_a_model_advances_with_every_other_chunk_however_many_adapters_come(
    tmp_path: Path, pool: DramPool, recorder: Recorder, checkpoints: ModuleType
) -> None:
    model, *adapters = (checkpoints.commit_random(tmp_path, size, seed) for seed, size in enumerate([20] + [1] * 30))
    order = order_of_reading(pool, recorder, tmp_path, model, adapters)
    for end in range(40):
        assert order[:end].count(0) >= end // 2
    read = [number for number in order if number]
    assert read == sorted(read), "adapters come in order of arrival"


def test_of_two_models_the_second_waits_for_the_first(
    tmp_path: Path, pool: DramPool, recorder: Recorder, checkpoints: ModuleType
) -> None:
    """In turns both would be late."""
    first, second = (checkpoints.commit_random(tmp_path, size, seed) for seed, size in enumerate([20, 10]))
    assert order_of_reading(pool, recorder, tmp_path, first, [second]) == [0] * 20 + [1] * 10


def test_cancelling_returns_exactly_the_chunks_that_were_not_started(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(tmp_path, 30, seed=1)
    job = trusted_job(tmp_path, manifest)
    recorder.hold.clear()
    reader.submit(job)
    recorder.wait(4)
    assert reader.queued_bytes() == manifest.num_bytes - 4 * manifest.chunk_bytes
    dropped = [chunk.index for chunk in reader.cancel(job)]
    recorder.hold.set()
    time.sleep(0.05)
    assert sorted(dropped + recorder.indices) == list(range(30))
    assert len(recorder.indices) == 4
    assert reader.queued_bytes() == 0
    assert not job.is_open
    assert reader.cancel(job) == []


def test_readers_read_on_while_what_they_read_is_checked(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    """Each held chunk occupies a thread after its check; the four places at the disk are taken by others."""
    recorder.hold.clear()
    reader.submit(job_for(tmp_path, checkpoints.commit_random(tmp_path, 30, seed=1)))
    recorder.wait(5)
    recorder.hold.set()
    recorder.wait(30)
    assert sorted(recorder.indices) == list(range(30))


@pytest.mark.parametrize("at_byte", [5000, 3 * 65536 + 17, -1])
def test_one_flipped_bit_is_found_and_named(
    at_byte: int, tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(tmp_path, 6, seed=1)
    path = tmp_path / manifest.digest / "model.safetensors"
    blob = bytearray(path.read_bytes())
    blob[at_byte] ^= 1
    path.write_bytes(blob)
    reader.submit(job_for(tmp_path, manifest))
    recorder.wait(6)
    bad = {chunk.index: error.message for _, chunk, error in recorder.chunks if error}
    index = at_byte // manifest.chunk_bytes if at_byte > 0 else 5
    assert list(bad) == [index]
    assert f"{path}: chunk {index} (byte {index * manifest.chunk_bytes}) has digest" in bad[index]


def test_a_trusted_file_is_not_checked_again_but_a_rewritten_one_is(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(tmp_path, 3, seed=1)
    path, stamp = tmp_path / manifest.digest / "model.safetensors", stamp_of(tmp_path, manifest)
    first = job_for(tmp_path, manifest, trusted=stamp)
    reader.submit(first)
    recorder.wait(3)
    assert not first.is_verifying
    path.write_bytes(bytes(manifest.num_bytes))  # right length, all zeros
    reader.submit(job_for(tmp_path, manifest, trusted=stamp))
    recorder.wait(6)
    assert all(error for _, _, error in recorder.chunks[3:])


def test_bandwidth_is_reported_per_window_of_chunks_and_at_the_end(
    tmp_path: Path, reader: ChunkReader, recorder: Recorder, checkpoints: ModuleType
) -> None:
    manifest = checkpoints.commit_random(tmp_path, 40, seed=1)
    reader.submit(job_for(tmp_path, manifest))
    recorder.wait(40)
    reader.close()  # whose threads report their last window first
    assert sum(num_bytes for num_bytes, _ in recorder.windows) == manifest.num_bytes
    assert len(recorder.windows) >= 2
    assert all(seconds > 0 for _, seconds in recorder.windows)


def test_closing_ends_the_threads_and_leaves_no_file_open(
    tmp_path: Path, pool: DramPool, recorder: Recorder, checkpoints: ModuleType
) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    reader = ChunkReader(pool, 4, recorder.on_chunk, lambda b, s: None)
    for seed in range(5):
        reader.submit(job_for(tmp_path, checkpoints.commit_random(tmp_path, 10, seed)))
    reader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("nearline-read") and t.is_alive()]
    assert {p for p in Path("/proc/self/fd").iterdir() if p.exists()} <= before
