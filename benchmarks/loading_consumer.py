"""Stands where an engine stands: maps checkpoints out of the pool and reads a byte of every page, as they arrive.

Usage: python -m benchmarks.loading_consumer POOL_FD READY_FD NUM_FRAMES FRAME_BYTES
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading_rivals import touch
from nearline.loader import MappedPool, attach
from nearline.protocol.frames import PoolLayout


def consume(pool: MappedPool, directory: Path, frames: list[int]) -> dict[str, Any]:
    """Attach, take every tensor, then read them in order; let go of all."""
    before, started = time.process_time(), time.perf_counter()
    loaded = attach(pool, directory, frames, "cpu")
    tensors = {name: loaded.tensor(name) for name in loaded.names()}
    attached_s = time.perf_counter() - started
    for name, tensor in tensors.items():
        loaded.wait_for([name])
        touch(tensor)
    usable_s = time.perf_counter() - started
    cpu_s = time.process_time() - before
    del tensors, tensor
    loaded.close()
    return {"attached_s": attached_s, "usable_s": usable_s, "cpu_s": cpu_s}


def main() -> None:
    pool_fd, ready_fd, num_frames, frame_bytes = (int(text) for text in sys.argv[1:])
    torch.set_num_threads(1)
    pool = MappedPool(pool_fd, ready_fd, PoolLayout(num_frames, frame_bytes))
    pool.fault_ahead()
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        wish = json.loads(line)
        print(json.dumps(consume(pool, Path(wish["directory"]), wish["frames"])), flush=True)


if __name__ == "__main__":
    main()
