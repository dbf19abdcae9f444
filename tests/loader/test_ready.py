"""Waiting follows the reader chunk by chunk, and ends when the reader fails or is gone."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from nearline.checkpoint_store import FRAME_FAILED, FRAME_READY, Manifest
from nearline.loader import LoadedCheckpoint, MappedPool, attach
from nearline.protocol.errors import CheckpointCorrupt, InstanceFailed
from nearline.protocol.frames import PoolLayout

NUM_FRAMES = 8


class Agent:
    """Stands for the node agent: it owns the memfds and sets ready bytes when told to."""

    def __init__(self, frame_bytes: int) -> None:
        self.fd, self.ready_fd = os.memfd_create("pool"), os.memfd_create("ready")
        os.ftruncate(self.fd, NUM_FRAMES * frame_bytes)
        os.ftruncate(self.ready_fd, NUM_FRAMES)
        self.ready = mmap.mmap(self.ready_fd, NUM_FRAMES)
        self.pool = MappedPool(self.fd, self.ready_fd, PoolLayout(NUM_FRAMES, frame_bytes))

    def close(self) -> None:
        self.pool.close()
        self.ready.close()
        os.close(self.fd)
        os.close(self.ready_fd)


@pytest.fixture
def agent(checkpoints: ModuleType) -> Iterator[Agent]:
    agent = Agent(checkpoints.TINY_CHUNK)
    yield agent
    agent.close()


@pytest.fixture
def manifest(tmp_path: object, checkpoints: ModuleType) -> Manifest:
    """Four chunks: the header and `a` in chunk 0, `b` in 0-1, `c` in 1-3."""
    sizes = {"a": 1000, "b": 80_000, "c": 120_000}
    result: Manifest = checkpoints.commit(tmp_path, {n: ("U8", (s,), bytes(s)) for n, s in sizes.items()})
    assert len(result.chunk_digests) == 4
    return result


@pytest.fixture
def bind(agent: Agent, manifest: Manifest, tmp_path: object) -> Iterator[Callable[..., LoadedCheckpoint]]:
    opened: list[LoadedCheckpoint] = []

    def make(stall_s: float = 60.0) -> LoadedCheckpoint:
        opened.append(attach(agent.pool, tmp_path / manifest.digest, [6, 1, 3, 2], "cpu", stall_s))  # type: ignore[operator]
        return opened[-1]

    yield make
    for checkpoint in opened:
        checkpoint.close()


def wait_in_thread(loaded: LoadedCheckpoint, name: str) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def wait() -> None:
        try:
            loaded.wait_for([name])
            outcome.append("ready")
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, outcome


def test_a_tensor_is_ready_when_its_own_chunks_are(agent: Agent, bind: Callable[..., LoadedCheckpoint]) -> None:
    loaded = bind()
    agent.ready[6] = FRAME_READY
    loaded.wait_for(["a"])
    thread, outcome = wait_in_thread(loaded, "b")
    time.sleep(0.03)
    assert outcome == []
    agent.ready[1] = FRAME_READY
    thread.join(60)
    assert outcome == ["ready"]
    assert not loaded.is_complete()
    agent.ready[2] = agent.ready[3] = FRAME_READY
    loaded.wait_for(["c", "a", "b"])
    assert loaded.is_complete()


def test_chunks_may_arrive_out_of_order(agent: Agent, bind: Callable[..., LoadedCheckpoint]) -> None:
    loaded = bind()
    for frame in (1, 3, 2):
        agent.ready[frame] = FRAME_READY
    loaded.wait_for(["c"])
    assert not loaded.is_complete()
    agent.ready[6] = FRAME_READY
    assert loaded.is_complete()


def test_a_wait_ends_soon_after_the_byte_is_set(agent: Agent, bind: Callable[..., LoadedCheckpoint]) -> None:
    took = []
    for _ in range(5):
        agent.ready[6] = 0
        loaded = bind()
        thread, outcome = wait_in_thread(loaded, "a")
        time.sleep(0.05)
        set_at = time.perf_counter()
        agent.ready[6] = FRAME_READY
        thread.join(60)
        took.append(time.perf_counter() - set_at)
        assert outcome == ["ready"]
    assert min(took) < 0.1, "nobody sleeps over it; a busy machine may delay any of them"


def test_a_failed_chunk_raises_and_names_the_checkpoint(
    agent: Agent, bind: Callable[..., LoadedCheckpoint], manifest: Manifest
) -> None:
    loaded = bind()
    agent.ready[6], agent.ready[1] = FRAME_READY, FRAME_FAILED
    loaded.wait_for(["a"])
    for name in ("b", "c"):
        with pytest.raises(CheckpointCorrupt, match=f"checkpoint {manifest.digest}: chunk 1 could not be read"):
            loaded.wait_for([name])
    assert not loaded.is_complete()


def test_a_reader_that_is_gone_is_noticed(agent: Agent, bind: Callable[..., LoadedCheckpoint]) -> None:
    agent.ready[6] = FRAME_READY
    with pytest.raises(InstanceFailed, match="chunk 1 has not arrived and no chunk of this node has"):
        bind(stall_s=0.1).wait_for(["b"])


def test_a_reader_busy_with_another_checkpoint_is_not_taken_for_gone(
    agent: Agent, bind: Callable[..., LoadedCheckpoint]
) -> None:
    loaded = bind(stall_s=2.0)
    thread, outcome = wait_in_thread(loaded, "a")
    for _ in range(3):
        for frame in (0, 4, 5, 7):  # frames of somebody else
            time.sleep(0.25)
            agent.ready[frame] = 1 - agent.ready[frame]
    assert outcome == []
    agent.ready[6] = FRAME_READY
    thread.join(60)
    assert outcome == ["ready"]


def test_closing_ends_a_wait_in_another_thread(agent: Agent, bind: Callable[..., LoadedCheckpoint]) -> None:
    loaded = bind()
    thread, outcome = wait_in_thread(loaded, "a")
    time.sleep(0.02)
    loaded.close()
    thread.join(60)
    assert isinstance(outcome[0], InstanceFailed)
