"""Compiles the C sources for this CPU, once per user, source and CPU kind; knows the compiler and the cache."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")

TIERS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
"""Best first: name of a build → the CPU flags (as /proc/cpuinfo spells them) it may use."""

_FLAGS = ("-O3", "-std=gnu17", "-fPIC", "-shared", "-Wall", "-Wno-psabi", "-fno-math-errno")


class BuildFailed(Exception):
    """The library cannot be compiled here; the message says why."""


def cpu_flags() -> frozenset[str]:
    """Return this CPU's feature flags, none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())


def best_tier(flags: frozenset[str]) -> str:
    """Return the first tier whose every flag the CPU has."""
    return next(name for name, needed in TIERS.items() if flags.issuperset(needed))


def cache_dir() -> Path:
    """Return the per-user directory that keeps compiled libraries."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nearline" / "kernels"


def library(tier: str | None = None, directory: Path | None = None) -> Path:
    """Return the compiled library for this CPU, compiling it unless the cache has it.

    Several processes may ask at once: each compiles to a name of its own and renames it, the last one wins with the
    same bytes. Raises BuildFailed if there is no compiler or it fails.
    """
    name = tier or best_tier(cpu_flags())
    sources = sorted(SOURCES.glob("*.[ch]"))
    command = [_compiler(), *_FLAGS, *(_march(flag) for flag in TIERS[name])]
    target = (directory or cache_dir()) / f"nearline-kernels-{name}-{_key(command, sources)}.so"
    if not target.exists():
        _compile(command, [source for source in sources if source.suffix == ".c"], target)
    return target


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildFailed("no C compiler found (looked for $CC, cc, gcc, clang)")


def _march(flag: str) -> str:
    return f"-m{flag.replace('_', '')}"


def _key(command: Sequence[str], sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for part in (platform.machine(), *command):
        digest.update(part.encode() + b"\0")
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / "library.so"
            arguments = [*command, *map(str, sources), "-o", str(built), "-lpthread", "-lm"]
            result = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
            if result.returncode != 0:
                raise BuildFailed(f"{command[0]} exited with {result.returncode}: {result.stderr.strip()[-2000:]}")
            built.replace(target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]} could not write {target}: {error}") from None
