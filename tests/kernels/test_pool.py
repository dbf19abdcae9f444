"""The thread pool seen from outside: forks, callers at the same moment, thread counts, a pool that sleeps."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from nearline import kernels

pytestmark = pytest.mark.usefixtures("compiled")


def _product(x: Tensor, w: Tensor) -> Tensor:
    return kernels.linear(x, w)


def test_callers_at_the_same_moment_all_get_their_own_result() -> None:
    w = torch.randn(3000, 64)
    inputs = [torch.randn(9, 64) for _ in range(4)]
    expected = [_product(x, w) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        wrong.extend(i for _ in range(60) if not torch.equal(_product(inputs[i], w), expected[i]))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_computes_although_it_has_none_of_the_threads() -> None:
    x, w = torch.randn(5, 64), torch.randn(3000, 64)
    expected = _product(x, w)
    child = os.fork()
    if child == 0:
        is_right = torch.equal(_product(x, w), expected)
        kernels.set_num_threads(2)
        os._exit(0 if is_right and torch.equal(_product(x, w), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_an_idle_pool_uses_no_processor_time() -> None:
    x, w = torch.randn(5, 64), torch.randn(3000, 64)
    _product(x, w)
    used = []
    for _ in range(5):  # other threads of this process may have something to do, but not each time
        before = time.process_time()
        time.sleep(0.1)
        used.append(time.process_time() - before)
    assert min(used) < 0.02
    assert torch.equal(_product(x, w), _product(x, w))


def test_the_number_of_threads_may_grow_and_shrink_at_any_time() -> None:
    x, w = torch.randn(5, 64), torch.randn(3000, 64)
    expected = _product(x, w)
    for num_threads in (4, 1, 3, 2, 8, 2):
        kernels.set_num_threads(num_threads)
        for _ in range(20):
            assert torch.equal(_product(x, w), expected)
    with pytest.raises(ValueError, match="at least 1"):
        kernels.set_num_threads(0)


WORKERS_CORES = """
import os, torch
from nearline import kernels
torch.set_num_threads(1)
before = set(os.listdir("/proc/self/task"))
kernels.set_num_threads(2)
x, w = torch.randn(5, 64), torch.randn(3000, 64)
for _ in range(50):
    kernels.linear(x, w)
(worker,) = set(os.listdir("/proc/self/task")) - before
print(len(os.sched_getaffinity(0) - os.sched_getaffinity(int(worker))))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_worker_stays_off_the_callers_core() -> None:
    result = subprocess.run(
        [sys.executable, "-c", WORKERS_CORES], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["1"]
