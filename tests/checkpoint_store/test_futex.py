"""A word of shared memory that changes wakes who waits for it, in this process and in others."""

import mmap
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from nearline.checkpoint_store import futex

WAITER = """
import mmap, sys
import numpy as np
from nearline.checkpoint_store import futex
memory = mmap.mmap(int(sys.argv[1]), 4096, prot=mmap.PROT_READ)
address = np.frombuffer(memory, np.uint8).ctypes.data + 4
print("waiting", flush=True)
while not memory[5]:
    futex.wait(address, 0, 30.0)
print("woken", flush=True)
"""
pytestmark = pytest.mark.skipif(not futex.CAN_WAIT, reason="futex is not known for this kind of machine")


@pytest.fixture
def word() -> tuple[int, mmap.mmap, int]:
    """A shared page: its descriptor, a mapping, and the address of its second word."""
    fd = os.memfd_create("word")
    os.ftruncate(fd, 4096)
    memory = mmap.mmap(fd, 4096)
    return fd, memory, np.frombuffer(memory, np.uint8).ctypes.data + futex.WORD_BYTES


def test_another_process_that_maps_it_for_reading_is_woken(word: tuple[int, mmap.mmap, int]) -> None:
    fd, memory, address = word
    with subprocess.Popen(
        [sys.executable, "-c", WAITER, str(fd)], pass_fds=[fd], stdout=subprocess.PIPE, text=True
    ) as waiter:
        assert waiter.stdout
        assert waiter.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        started = time.monotonic()
        memory[5] = 1
        futex.wake(address)
        assert waiter.stdout.readline() == "woken\n"
        assert time.monotonic() - started < 10, "long before its time was over"


def test_a_word_that_has_changed_already_is_not_waited_for(word: tuple[int, mmap.mmap, int]) -> None:
    _, memory, address = word
    memory[4] = 7
    started = time.monotonic()
    futex.wait(address, 0, 30.0)
    assert time.monotonic() - started < 10


def test_nobody_waits_longer_than_told(word: tuple[int, mmap.mmap, int]) -> None:
    started = time.monotonic()
    futex.wait(word[2], 0, 0.05)
    assert 0.04 < time.monotonic() - started < 10


def test_every_waiter_is_woken(word: tuple[int, mmap.mmap, int]) -> None:
    _, memory, address = word
    threads = [threading.Thread(target=futex.wait, args=(address, 0, 30.0)) for _ in range(3)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    memory[4] = 1
    futex.wake(address)
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 10
