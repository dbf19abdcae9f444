"""The thread that reads adapters: a read that hangs costs nobody else more than its time, and no instance after it."""

import threading
import time
from collections.abc import Iterator

import pytest

from nearline.engine.adapter_memory import AdapterMemory
from nearline.engine.adapter_reader import AdapterRead, AdapterReader
from nearline.protocol import Digest

LIMIT_S = 60.0
WAIT_S = 30.0
A, B, C = Digest("a"), Digest("b"), Digest("c")


class Bench:
    """A reader, and a disk on which one adapter hangs until `answer` is set."""

    def __init__(self) -> None:
        self.news = threading.Event()
        self.answer, self.hangs = threading.Event(), threading.Event()
        self.reader = AdapterReader(self.news.set, LIMIT_S)
        self.ended: list[AdapterRead] = []

    def stuck(self, memory: AdapterMemory) -> int:
        self.hangs.set()
        self.answer.wait()
        return 9

    def hang(self, digest: Digest, owner: str = "one") -> None:
        self.hangs.clear()
        self.reader.start(owner, digest, self.stuck, lease_id=7)
        assert self.hangs.wait(WAIT_S)

    def until_ended(self, *digests: Digest) -> None:
        until = time.monotonic() + WAIT_S
        while not {read.digest for read in self.ended} >= set(digests):
            assert self.news.wait(until - time.monotonic()), self.ended
            self.news.clear()
            self.ended += self.reader.finished()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.answer.set()


def test_only_the_read_under_way_can_take_too_long_and_the_next_begin_beside_it(bench: Bench) -> None:
    bench.hang(A)
    for digest in (B, C):
        bench.reader.start("one", digest, lambda _: 5)
    now = time.monotonic()
    assert bench.reader.overdue(now) == []
    due = bench.reader.next_due(now)
    assert due is not None
    assert due <= now + LIMIT_S
    assert [job.digest for job in bench.reader.overdue(due)] == [A]
    bench.until_ended(B, C)
    assert [(read.digest, read.num_bytes, read.error) for read in bench.ended] == [(B, 5, None), (C, 5, None)]
    assert bench.reader.next_due(now) is None
    bench.answer.set()
    bench.until_ended(A)
    assert bench.ended[-1].lease_id == 7, "what was lent to it is known until then"


def test_a_second_read_that_hangs_is_given_up_as_the_first_was(bench: Bench) -> None:
    for digest in (A, B):
        bench.hang(digest)
        assert [job.digest for job in bench.reader.overdue(time.monotonic() + LIMIT_S)] == [digest]
    bench.reader.start("one", C, lambda _: 5)
    bench.until_ended(C)


def test_reads_of_an_instance_that_is_gone_hold_up_none_of_the_next(bench: Bench) -> None:
    bench.hang(A)
    bench.reader.start("one", B, lambda _: 5, lease_id=8)
    bench.reader.give_up_all()
    bench.reader.start("two", C, lambda _: 5)
    bench.until_ended(B, C)
    assert [(read.owner, read.digest, read.num_bytes, read.lease_id) for read in bench.ended] == [
        ("one", B, 0, 8),
        ("two", C, 5, 0),
    ]
    assert bench.reader.overdue(time.monotonic() + LIMIT_S) == []
