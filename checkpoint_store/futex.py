"""Wakes processes that wait for a word of shared memory to change: futex(2). Linux only, as all of the platform."""

import ctypes
import platform

from nearline.protocol import Seconds

WORD_BYTES = 4
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Timespec)]
_syscall.restype = ctypes.c_long
CAN_WAIT = _NUMBER is not None
"""Whether `wait` can be woken on this kind of machine; elsewhere its caller looks again now and then."""


def wait(address: int, seen: int, timeout_s: Seconds) -> None:
    """Sleep until `wake(address)`, but not if the word is not `seen` any more, and not longer than the time given.

    The word lies on a multiple of WORD_BYTES in shared memory, which may be mapped read-only here.
    """
    if _NUMBER is None:
        raise NotImplementedError(f"futex is not known for {platform.machine()}")
    limit = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    _syscall(_NUMBER, address, _FUTEX_WAIT, seen, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake whoever waits at this address in any process. Costs a microsecond when nobody does."""
    if _NUMBER is not None:
        _syscall(_NUMBER, address, _FUTEX_WAKE, _EVERYBODY, None)
