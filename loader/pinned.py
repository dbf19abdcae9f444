"""Host memory as a source of copies to a CUDA device: the pool's frames, pinned, or memory of one's own."""

import contextlib
import mmap
import threading
import warnings
from typing import Any

import torch

from nearline.protocol import Bytes
from nearline.protocol.frames import PoolLayout

_REGISTER_PORTABLE = 1


def fresh_memory(num_bytes: Bytes) -> torch.Tensor:
    """Private memory on page boundaries, as direct reads want it; it goes with the tensor."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def pinned_memory(num_bytes: Bytes) -> torch.Tensor:
    """Private memory that CUDA copies from at full speed; pageable, with a warning, where CUDA refuses."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        warnings.warn(f"CUDA cannot pin {num_bytes} bytes ({error}), copies will be slower", stacklevel=2)
        return fresh_memory(num_bytes)


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
