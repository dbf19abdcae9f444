"""One engine in a process of its own, told what to time: a JSON line in, a JSON line out, until its input ends.

Usage: python -m benchmarks.engine_worker KIND PATH [DIGEST] --threads N
A process each keeps their thread pools apart: most spin for a while after a step, and would slow the next engine down.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

KINDS = ("ours", "llama.cpp", "transformers", "transformers-cb", "ctranslate2-float32", "ctranslate2-int8")


def engine_of(kind: str, path: Path, digest: str, num_threads: int) -> Any:
    """Make the engine. Raises whatever says that it cannot run here."""
    if kind == "ours":
        from benchmarks.engine_ours import OurEngine
        from nearline.protocol import Digest

        return OurEngine(path, Digest(digest), num_threads)
    from benchmarks import engine_rivals as rivals

    if kind == "llama.cpp":
        return rivals.LlamaCpp(path, num_threads)
    if kind == "transformers":
        return rivals.Transformers(path, num_threads)
    if kind == "transformers-cb":
        return rivals.ContinuousTransformers(path, num_threads)
    return rivals.CTranslate2(path, num_threads, kind.partition("-")[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("path", type=Path)
    parser.add_argument("digest", nargs="?", default="")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is no answer
    try:
        engine = engine_of(options.kind, options.path, options.digest, options.threads)
        answer: dict[str, Any] = {"name": engine.name}
    except Exception as error:
        answer, engine = {"error": f"{type(error).__name__}: {error}"}, None
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin if engine is not None else ():
        wish = json.loads(line)
        try:
            answer = {"value": getattr(engine, wish["what"])(*wish["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
