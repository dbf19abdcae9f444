"""Our engine beside llama.cpp, transformers and ctranslate2: decoding, prefill, and what traffic does to a stream.

Usage: python -m benchmarks.engine [--rounds 3] [--no-rivals] [--quick]
Writes benchmarks/results/engine.md and engine.svg. SmolLM2-135M, prompts of random tokens, greedy, two threads.
All engines stand ready in processes of their own and are asked in turn; a ratio is of one round, and medians of ratios
are reported. Decoding is timed over the middle of 64 tokens after a prompt of 128 (all 64 at batch 1).
"""

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import engine_report, record
from benchmarks.engine_files import EngineFiles, make_files

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("int8", "int4")
WINDOWS = {1: (128, 64), 8: (144, 32), 32: (152, 16)}
"""Batch → (prompt, tokens timed): the mean context is that of 64 tokens after 128 at every batch."""
ANSWER_LIMIT_S = 60
"""A rival that takes longer is left out, and the report says so."""
Seconds = engine_report.Seconds
"""(engine, measure) → value per round. Measures: "decode 8", seconds per step; "prefill"."""


class Worker:
    """One engine's process; `name` is how it calls itself. Raises RuntimeError if it cannot run here."""

    def __init__(self, kind: str, path: Path, digest: str, num_threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.engine_worker", kind, str(path), *([digest] if digest else [])]
        environment = os.environ | {"OMP_NUM_THREADS": str(num_threads)}
        if kind == "ours":
            environment["OMP_WAIT_POLICY"] = "passive"  # as the node agent starts it
        self._process = subprocess.Popen(
            [*command, "--threads", str(num_threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=None if os.environ.get("NEARLINE_BENCH_VERBOSE") else subprocess.DEVNULL, cwd=ROOT, env=environment,
        )  # fmt: skip
        self.name: str = self._answer()["name"]

    def ask(self, what: str, *arguments: Any) -> float:
        """Run one method of the engine there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["value"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)[0]:
            raise RuntimeError(f"no answer in {ANSWER_LIMIT_S} s")
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def start_workers(files: EngineFiles, num_threads: int, with_rivals: bool, stack: ExitStack) -> "Started":
    """Start every engine that runs here; say why the others do not."""
    wanted = [(f"nearline {name}", "ours", root, str(digest)) for name, (root, digest) in files.ours.items()]
    if with_rivals:
        wanted += [(f"llama.cpp {kind}", "llama.cpp", path, "") for kind, path in files.ggufs.items()]
        others = ("transformers", "transformers-cb", "ctranslate2-float32", "ctranslate2-int8")
        wanted += [(kind, kind, files.hf, "") for kind in others]
    started = Started({}, {})
    for label, kind, path, digest in wanted:
        try:
            worker = Worker(kind, path, digest, num_threads)
        except RuntimeError as error:
            started.notes[label] = f"does not run here ({error})"
            continue
        stack.callback(worker.close)
        print(f"{label} is ready", flush=True)
        started.workers[label] = worker
        started.notes[label] = worker.name
    return started


class Started:
    """The engines' processes by label, and a note on each."""

    def __init__(self, workers: dict[str, Worker], notes: dict[str, str]) -> None:
        self.workers, self.notes = workers, notes


def measure(started: Started, num_rounds: int, batches: tuple[int, ...]) -> Seconds:
    """Ask all engines in turn. Rivals that are no one's first choice are asked in the first round only."""
    seconds: Seconds = {}
    for round_number in range(num_rounds):
        for label, worker in list(started.workers.items()):
            began_at = time.perf_counter()
            if round_number and label in engine_report.ASKED_ONCE:
                continue
            wishes: list[tuple[str, str, tuple[int, ...]]]
            wishes = [(f"decode {batch}", "decode_s", (batch, *WINDOWS[batch])) for batch in batches]
            wishes.append(("prefill", "prefill_s", (engine_report.PREFILL_TOKENS,)))
            asked = engine_report.ASKED_ONCE.get(label, engine_report.ALL)
            for measure_name, what, arguments in (wish for wish in wishes if wish[0] in asked):
                try:
                    value = worker.ask(what, *arguments)
                except RuntimeError as error:
                    started.notes[label] += f"; {measure_name} failed ({error})"
                    started.workers.pop(label).close()
                    break
                seconds.setdefault((label, measure_name), []).append(value)
            took_s = time.perf_counter() - began_at
            print(f"round {round_number + 1} of {num_rounds}: {label}, {took_s:.0f} s", flush=True)
    return seconds


def measure_traffic(ours: Worker, num_rounds: int) -> dict[str, list[float]]:
    """What only our engine is asked: see the methods of OurEngine."""
    found: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        found.setdefault("floor", []).append(ours.ask("floor_share", *WINDOWS[1]))
        for batch in (1, 8):
            share = ours.ask("share_beside_busy", batch, *WINDOWS[batch])
            found.setdefault(f"busy {batch}", []).append(share)
        found.setdefault("gap", []).append(ours.ask("gap_over_target", 4, 2000))
        found.setdefault("prefix", []).append(ours.ask("ttft_ratio_of_shared_prefix", 1000, 24))
    return found


def measure_parts(ours: Worker, batch: int) -> dict[str, float]:
    """Seconds per decoding step of our engine in each of its parts."""
    return {part: ours.ask("part_s", part, batch, *WINDOWS[batch]) for part in engine_report.PARTS}


def measure_floors(ours: Worker, batches: tuple[int, ...]) -> dict[str, float]:
    """Seconds that the weights' bytes, or the products alone at our kernels' best rate, take here, by measure."""
    floors = {f"decode {batch}": ours.ask("floor_s", batch, True) for batch in batches}
    return floors | {"prefill": ours.ask("floor_s", engine_report.PREFILL_TOKENS, False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-rivals", action="store_true", help="measure us alone")
    parser.add_argument("--quick", action="store_true", help="one short round of us alone; nothing is written")
    options = parser.parse_args()
    with_rivals = not (options.no_rivals or options.quick)
    work = Path(tempfile.mkdtemp(prefix="nearline-bench-"))
    try:
        files = make_files(options.model.resolve(), work, () if options.quick else FORMATS, with_rivals)
        with ExitStack() as stack:
            started = start_workers(files, options.threads, with_rivals, stack)
            num_rounds, batches = (1, (1, 8)) if options.quick else (options.rounds, tuple(WINDOWS))
            seconds = measure(started, num_rounds, batches)
            ours = started.workers["nearline bf16"]
            traffic = {} if options.quick else measure_traffic(ours, min(num_rounds, 2))
            floors = measure_floors(ours, batches)
            parts = {batch: measure_parts(ours, batch) for batch in batches}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = engine_report.report(seconds, traffic, parts, floors, started.notes)
    print(text)
    if not options.quick:
        path = record.write("engine", "Decoding and prefill of a small model on a CPU", text)
        engine_report.plot(seconds, path.with_suffix(".svg"))
        print("written to", path)


if __name__ == "__main__":
    main()
