"""Memory for adapters, touched ahead of need: on fresh pages the first touch costs more than the bytes that come."""

import ctypes
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearline.protocol import Bytes

_PIECE_BYTES: Bytes = 2 << 20
"""Sizes are rounded up to huge pages."""
USUAL_BYTES: Bytes = 16 << 20
"""What is touched before anybody knows how large adapters are."""
_MAX_SPARES = 2


class AdapterMemory:
    """Lends pieces of memory that come back by themselves when their last tensor is gone. Safe for several threads.

    Owns: at most two spare pieces, so that the next adapter, or one that takes an evicted one's turn, finds its memory
    touched.
    """

    def __init__(self) -> None:
        self._spares: list[mmap.mmap] = []
        self._lock = threading.RLock()
        """Of a kind that a thread may take twice: collecting garbage under it may give a piece back."""

    def take(self, num_bytes: Bytes) -> Tensor:
        """Lend at least `num_bytes`, uint8, on a page boundary; the content is anything."""
        piece = self._spare(num_bytes) or _fresh(num_bytes)
        view: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(piece, np.uint8)
        weakref.finalize(view, self._give_back, piece).atexit = False
        return torch.from_numpy(view)

    def prepare(self, num_bytes: Bytes = USUAL_BYTES) -> None:
        """Have a spare piece of at least `num_bytes` touched, for the next `take`; the interpreter runs meanwhile."""
        with self._lock:
            if any(len(spare) >= num_bytes for spare in self._spares):
                return
        piece = _fresh(num_bytes)
        first = ctypes.c_char.from_buffer(piece)
        ctypes.memset(ctypes.addressof(first), 0, len(piece))
        del first
        self._give_back(piece)

    @property
    def spare_bytes(self) -> Bytes:
        with self._lock:
            return sum(len(spare) for spare in self._spares)

    def _spare(self, num_bytes: Bytes) -> mmap.mmap | None:
        with self._lock:
            fitting = [spare for spare in self._spares if num_bytes <= len(spare) <= 2 * num_bytes + USUAL_BYTES]
            best = min(fitting, key=len, default=None)
            if best is not None:
                self._spares.remove(best)
            return best

    def _give_back(self, piece: mmap.mmap) -> None:
        with self._lock:
            self._spares.append(piece)
            if len(self._spares) > _MAX_SPARES:
                self._spares.remove(min(self._spares, key=len))


def _fresh(num_bytes: Bytes) -> mmap.mmap:
    piece = mmap.mmap(-1, max(1, -(-num_bytes // _PIECE_BYTES)) * _PIECE_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
