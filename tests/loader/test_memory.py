"""What a loaded checkpoint takes of a process: nothing of its own from the pool, its own size from a directory."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

NUM_BYTES = 96 << 20
PROGRAM = """
import re, sys, gc
from pathlib import Path
import torch
from nearline.loader import load_directory
def private(): return 1024 * int(re.search(r"RssAnon:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = private()
loaded = load_directory(Path(sys.argv[1]), "cpu")
tensors = [loaded.tensor(name) for name in loaded.names()]
total = sum(int(t.view(torch.uint8).sum()) for t in tensors)
gc.collect()
print(private() - before, {t.dtype for t in tensors})
"""


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_sixteen_bits_stay_sixteen_bits(tmp_path: Path, checkpoints: ModuleType, dtype: str) -> None:
    half = NUM_BYTES // 2
    raw = checkpoints.random_bytes(half, 1)
    tensors = dict.fromkeys(("a", "b"), (dtype, (half // 2048, 1024), raw))
    manifest = checkpoints.commit(tmp_path, tensors, chunk_bytes=16 << 20)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / manifest.digest)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, dtypes = done.stdout.split(" ", 1)
    assert int(grown) <= 1.2 * NUM_BYTES
    assert dtypes.strip() == {"BF16": "{torch.bfloat16}", "F16": "{torch.float16}"}[dtype]
