"""An import takes two chunks and the largest tensor of memory, however large the model is."""

import subprocess
import sys
from pathlib import Path

from benchmarks.loading_files import write_model
from nearline.checkpoint_store import CHUNK_BYTES
from nearline.checkpoint_store.safetensors_file import open_safetensors

SLACK = 6 << 20
"""Headers, manifests and what the allocator rounds up to."""
IMPORT = """
import re, sys
from pathlib import Path
from nearline.checkpoint_store.__main__ import main
assert main(["import", "--root", sys.argv[1], "--source", sys.argv[2]]) == 0
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak_bytes(source: Path, root: Path) -> int:
    """Import in a process of its own; the most memory it ever had."""
    done = subprocess.run([sys.executable, "-c", IMPORT, root, source], capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1]) * 1024


def test_an_import_takes_two_chunks_and_the_largest_tensor(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny", 1 << 20, seed=1, is_narrow=True)
    num_bytes = write_model(tmp_path / "large", 160 << 20, seed=2)
    largest = max(tensor.entry.num_bytes for tensor in open_safetensors(tmp_path / "large/model.safetensors").values())
    assert num_bytes > 8 * CHUNK_BYTES
    extra = peak_bytes(tmp_path / "large", tmp_path / "store") - peak_bytes(tmp_path / "tiny", tmp_path / "store")
    assert extra <= 2 * CHUNK_BYTES + largest + SLACK, f"{extra / 2**20:.0f} MiB"
