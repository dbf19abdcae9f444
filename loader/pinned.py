"""The pool's frames as pinned sources for copies to a CUDA device."""

import contextlib
import threading
import warnings
from typing import Any

import torch

from nearline.protocol import Bytes
from nearline.protocol.frames import PoolLayout

_REGISTER_PORTABLE = 1


class PinnedFrames:
    """Registers a frame with CUDA once, when it is first used, and keeps it so for the life of the process:
    registering costs about as much as reading from a good disk. Where CUDA refuses, copies go on from pageable memory.

    Owns: `memory`, one writable mapping of the whole pool (CUDA registers read-only memory only on some platforms);
    nothing writes through it.
    """

    def __init__(self, memory: torch.Tensor, layout: PoolLayout) -> None:
        self._memory = memory
        self._frame_bytes = layout.frame_bytes
        self._is_done = [False] * layout.num_frames
        self._can_pin = True
        self._lock = threading.Lock()

    def source(self, frame: int, num_bytes: Bytes, device: torch.device) -> torch.Tensor:
        """Return the first bytes of a frame as a uint8 tensor, pinned if CUDA allows."""
        start = frame * self._frame_bytes
        with self._lock:
            if self._can_pin and not self._is_done[frame]:
                self._can_pin = self._register(start, device)
                self._is_done[frame] = True
        return self._memory[start : start + num_bytes]

    def _register(self, start: Bytes, device: torch.device) -> bool:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(self._memory.data_ptr() + start, self._frame_bytes, _REGISTER_PORTABLE))
        if code == 0:
            return True
        warnings.warn(
            f"CUDA cannot pin the DRAM pool (error {code}), copies will be slower; raise ulimit -l", stacklevel=2
        )
        with contextlib.suppress(RuntimeError):  # the failed call's error would surface at the next kernel launch
            torch.zeros(1, device=device)
        return False
