"""Loading a checkpoint: ours, the loaders that run on this machine, and what the disk and the memory give.

Usage: python -m benchmarks.loading [--rounds 5] [--gb 3.0] [--quick] [--only SECTION ...] [--rivals NAME ...]
Writes benchmarks/results/loading.md and loading.svg. Needs `pip install -e .[rivals]` for the rivals and fio for the
limit; what is not installed is skipped with a note. Everything of a round is measured close together and compared
within the round. The page cache of whatever is read cold is dropped right before.
"""

import argparse
import json
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from benchmarks import limits, loading_report, record
from benchmarks.disk import direct_read_bytes_per_s, forget_pages
from benchmarks.loading_files import llama_config, sync, write_model, write_rival_formats
from benchmarks.loading_ours import Engine, Store, import_s
from benchmarks.loading_rivals import READERS, version
from nearline.checkpoint_store import WEIGHTS_NAME
from nearline.protocol import Digest

NUM_THREADS = 2
PROMPT_TOKENS = 64
ALSO = {0: "shards", 1: "warm"}
"""What rivals do beside the cold read of one file, by round: everything in every round would take too long."""


class Rival:
    """One rival's process. Owns it until `close`."""

    def __init__(self, name: str) -> None:
        self.folder, self.reads_shards = READERS[name][1], READERS[name][2]
        command = [sys.executable, "-m", "benchmarks.loading_rivals", name]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} does not start")

    def load(self, path: Path) -> dict[str, float]:
        """Load a folder in a fresh fork. Raises RuntimeError with the rival's own words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"path": str(path)}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Bench:
    """Everything measured: per round one dict of numbers for each section, and notes on what was left out."""

    work: Path
    num_rounds: int
    rivals: list[str]
    config: dict[str, object] = field(default_factory=dict)
    rounds: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0
    digests: list[Digest] = field(default_factory=list)
    small: Digest = Digest("")

    @property
    def root(self) -> Path:
        return self.work / "store"

    @property
    def weights(self) -> Path:
        return self.root / "checkpoints" / self.digests[0] / WEIGHTS_NAME

    def add(self, section: str, numbers: dict[str, float]) -> None:
        self.rounds.setdefault(section, []).append(numbers)
        print(section, json.dumps({key: float(f"{value:.4g}") for key, value in numbers.items()}), flush=True)


def prepare(bench: Bench, num_bytes: int) -> None:
    """Write every format, and import two models and a small one; the imports are a measurement themselves."""
    bench.num_bytes = write_model(bench.work / "one-file", num_bytes, seed=1)
    bench.config = llama_config(num_bytes)
    write_rival_formats(bench.work)
    write_model(bench.work / "second", num_bytes, seed=2)
    write_model(bench.work / "small", num_bytes, seed=3, is_narrow=True)
    sync(bench.work)
    bench.digests = [measured_import(bench, folder) for folder in ("one-file", "second")]
    shutil.rmtree(bench.work / "second")
    bench.small, _ = import_s(bench.root, bench.work / "small")


def measured_import(bench: Bench, folder: str, is_cold: bool = True) -> Digest:
    """Import a folder from the disk, or from memory as after a download, right after fio wrote as many bytes."""
    source = bench.work / folder
    wrote = limits.fio_write_bytes_per_s(bench.work, bench.num_bytes) if limits.has_fio() else 0.0
    floor_s = bench.num_bytes / wrote if wrote else 0.0
    forget_pages(source)
    if is_cold:
        floor_s += bench.num_bytes / direct_read_bytes_per_s(source / "model.safetensors")
    else:
        for path in source.iterdir():
            _read_through(path)
    digest, elapsed = import_s(bench.root, source)
    key = "from disk" if is_cold else "from memory"
    numbers = {"write": wrote, key: bench.num_bytes / elapsed, f"{key} s": elapsed, f"{key} floor s": floor_s}
    bench.add("import", numbers)
    return digest


def _read_through(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(16 << 20):
            pass


def measure_readers(bench: Bench, store: Store) -> None:
    """Cold, from one file and from shards, then warm: fio, ours, the rivals."""
    rivals: dict[str, Rival] = {}
    try:
        store.load(bench.digests[0])  # the first load after an import checks digests
        for name in bench.rivals:
            rivals[name] = Rival(name)
        for number in range(bench.num_rounds):
            names = list(rivals)
            names = names[number % len(names) :] + names[: number % len(names)] if names else []
            also = ALSO.get(number, "") if bench.num_rounds > 1 else "shards, warm"
            bench.add("readers", _readers_round(bench, store, {name: rivals[name] for name in names}, also))
    finally:
        for rival in rivals.values():
            rival.close()


def _readers_round(bench: Bench, store: Store, rivals: dict[str, Rival], also: str) -> dict[str, float]:
    found: dict[str, float] = {}
    if limits.has_fio():
        for how in limits.READS:
            found[f"fio {how}"] = limits.fio_read_bytes_per_s(bench.weights, how)
    else:
        found["fio direct threads"] = direct_read_bytes_per_s(bench.weights)
    ways = [("nearline", False), ("nearline verified", True)]
    for key, is_verified in reversed(ways) if len(bench.rounds.get("readers", [])) % 2 else ways:
        ours = store.load_cold(bench.digests[0], is_verified)
        found |= {f"{key} cold": ours.usable_s, f"{key} cold cpu": ours.cpu_s, f"{key} filled": ours.filled_s}
    for name, rival in rivals.items():
        try:
            found |= _rival_round(bench, name, rival, also)
        except RuntimeError as error:
            note = f"{name} failed: {error}"
            bench.notes += [] if note in bench.notes else [note]
    warm = store.load(bench.digests[0])
    found |= {"nearline warm": warm.usable_s, "nearline warm cpu": warm.cpu_s}
    return found


def _rival_round(bench: Bench, name: str, rival: Rival, also: str) -> dict[str, float]:
    folder = bench.work / rival.folder
    forget_pages(folder)
    found = _numbers(f"{name} cold", rival.load(folder))
    if "warm" in also:
        found |= _numbers(f"{name} warm", rival.load(folder))
    forget_pages(folder)
    if "shards" in also and rival.reads_shards:
        forget_pages(bench.work / "sharded")
        found[f"{name} sharded"] = rival.load(bench.work / "sharded")["usable_s"]
        forget_pages(bench.work / "sharded")
    return found


def _numbers(what: str, answer: dict[str, float]) -> dict[str, float]:
    return {what: answer["usable_s"], f"{what} cpu": answer["cpu_s"], f"{what} loaded": answer["loaded_s"]}


def measure_tmpfs(bench: Bench) -> None:
    """Our checkpoint on a memory file system, beside plain copies in memory."""
    if shutil.disk_usage("/dev/shm").free < 2 * bench.num_bytes:
        bench.notes.append("/dev/shm is too small: the fast disk was not tried")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="nearline-bench-") as root:
        (Path(root) / "checkpoints").mkdir()
        shutil.copytree(bench.weights.parent, Path(root) / "checkpoints" / bench.digests[0])
        store, copy = Store(Path(root), bench.num_bytes + (64 << 20)), limits.MemoryCopy()
        try:
            store.load(bench.digests[0])
            for _ in range(bench.num_rounds):
                ours, memcpy = store.load_cold(bench.digests[0]), copy.bytes_per_s()
                rate = bench.num_bytes / ours.filled_s
                bench.add("tmpfs", {"memcpy": memcpy, "filled": rate, "usable": bench.num_bytes / ours.usable_s})
        finally:
            store.close()


def measure_dram(bench: Bench, store: Store) -> None:
    """From DRAM to tensors in a process that waits to be bound: the big checkpoint and one a tenth of it."""
    for digest in (bench.digests[0], bench.small):
        store.load(digest)
    for _ in range(2 * bench.num_rounds):
        big, small = store.load(bench.digests[0]), store.load(bench.small)
        bench.add("dram", {"big": big.attached_s, "small": small.attached_s, "big touched": big.usable_s})


def measure_engine(bench: Bench, store: Store) -> None:
    """A real engine process: first tokens while bytes arrive, and two models taking turns."""
    engine, memory = Engine(store.store, NUM_THREADS), limits.MemoryRead()
    vocab = int(str(bench.config["vocab_size"]))
    try:
        for digest in bench.digests:
            store.load(digest)
        for number in range(bench.num_rounds):
            read_s = store.load_cold(bench.digests[0]).filled_s
            store.store.evict(bench.digests[0])
            started = time.perf_counter()
            engine.start(bench.digests[0])
            engine.first_token(PROMPT_TOKENS, vocab)
            cold_s = time.perf_counter() - started
            prefill_s = _timed(lambda: engine.first_token(PROMPT_TOKENS, vocab))
            beside_s = _beside_a_read(store, bench.digests[1], lambda: engine.first_token(PROMPT_TOKENS, vocab))
            bench.add("ttft", {"read": read_s, "prefill": prefill_s, "prefill beside": beside_s, "cold": cold_s})
            swap = _swap(bench, engine, bench.digests[(number + 1) % 2])
            bench.add("swap", swap | {"weights once through memory": bench.num_bytes / memory.bytes_per_s()})
            engine.stop()
    finally:
        engine.close()


def _beside_a_read(store: Store, digest: Digest, work: Callable[[], object]) -> float:
    """Time work while another checkpoint is read: what reading takes from those who compute."""
    store.store.evict(digest)
    with store.store.acquire(digest) as lease:
        elapsed = _timed(work)
        lease.done.result(60)
    return elapsed


def _swap(bench: Bench, engine: Engine, target: Digest) -> dict[str, float]:
    """Let the bound model go and bind another that is in DRAM; page tables were filled in idle time before."""
    vocab = int(str(bench.config["vocab_size"]))
    engine.stop()
    engine.settle()
    engine.start(next(digest for digest in bench.digests if digest != target))
    engine.first_token(1, vocab)
    started = time.perf_counter()
    engine.stop()
    unbound_s = time.perf_counter() - started
    engine.start(target)
    bound_s = time.perf_counter() - started
    engine.first_token(1, vocab)
    swap_s = time.perf_counter() - started
    alone_s = min(_timed(lambda: engine.first_token(1, vocab)) for _ in range(3))
    return {"swap": swap_s, "unbind": unbound_s, "unbind and bind": bound_s, "forward": alone_s}


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_imports(bench: Bench) -> None:
    """Import the first model again, as if it had never been here."""
    for _ in range(2):
        shutil.rmtree(bench.weights.parent)
        measured_import(bench, "one-file", is_cold=False)


ON_DISK: dict[str, Callable[[Bench, Store], None]] = {
    "readers": measure_readers,
    "dram": measure_dram,
    "engine": measure_engine,
}
ALONE: dict[str, Callable[[Bench], None]] = {"tmpfs": measure_tmpfs, "import": measure_imports}


def measure(bench: Bench, num_bytes: int, sections: list[str]) -> None:
    _say("preparing")
    prepare(bench, num_bytes)
    if ON_DISK.keys() & sections:
        store = Store(bench.root, 2 * bench.num_bytes + bench.num_bytes // 5 + (96 << 20))
        try:
            for section in [name for name in ON_DISK if name in sections]:
                _say(section)
                ON_DISK[section](bench, store)
        finally:
            store.close()
    for section in [name for name in ALONE if name in sections]:
        _say(section)
        ALONE[section](bench)


def _say(section: str) -> None:
    print(time.strftime("%H:%M:%S"), section, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gb", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and one round, to see that it works")
    parser.add_argument("--only", nargs="*", choices=[*ON_DISK, *ALONE], default=[*ON_DISK, *ALONE])
    parser.add_argument("--rivals", nargs="*", choices=list(READERS), default=list(READERS))
    parser.add_argument("--work", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--results", type=Path, default=record.RESULTS)
    return parser.parse_args()


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that gigabytes of files go with us
    options = _options()
    num_bytes, num_rounds = (16 << 20, 1) if options.quick else (int(options.gb * 1e9), options.rounds)
    installed = [name for name in options.rivals if version(name)]
    work = Path(tempfile.mkdtemp(prefix="nearline-loading-", dir=options.work))
    bench = Bench(work, num_rounds, installed)
    bench.notes = [f"{name} is not installed" for name in options.rivals if name not in installed]
    bench.notes += [] if limits.has_fio() else ["fio is not installed: our own direct reads stand for the disk"]
    started = time.monotonic()
    try:
        measure(bench, num_bytes, options.only)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    found = loading_report.Found(bench.num_bytes, num_rounds, bench.rounds, bench.notes, PROMPT_TOKENS)
    body = loading_report.body(found) + f"\n\nThe whole run took {time.monotonic() - started:.0f} s."
    print(body)
    print("written to", record.write("loading", "Loading checkpoints", body, options.results))
    loading_report.plot(found, options.results / "loading.svg")


if __name__ == "__main__":
    main()
