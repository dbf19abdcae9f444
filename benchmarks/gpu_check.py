"""Is this GPU served correctly, and how fast? Every kernel, the engine, the loader; under 8 minutes.

python benchmarks/gpu_check.py               # on a machine with a CUDA device; writes benchmarks/results/gpu.md
python benchmarks/gpu_check.py --interpret   # without one: correctness alone, kernels interpreted on tiny shapes
"""

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

if not __package__:  # run as a file: the repository's root is not on the path yet
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_BUDGET_S = 450.0
_CHECK_BYTES, _INTERPRETED_BYTES = 600 << 20, 40 << 20


def main() -> int:
    """Check, print a table and, on a device, write it down. Exit 1 if anything is not as aimed, 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="no device: interpret the kernels on tiny shapes")
    parser.add_argument("--no-speed", action="store_true", help="correctness alone")
    parser.add_argument("--budget-s", type=float, default=_BUDGET_S, help="begin nothing after so many seconds")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    if arguments.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

    import structlog
    import torch

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if not arguments.interpret and not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_check: torch sees no CUDA device here; run it on a machine with one, "
            "or with --interpret to check the kernels' results without one\n"
        )
        return 2
    return _run("cpu" if arguments.interpret else "cuda:0", deadline, with_speed=not arguments.no_speed)


def _run(device: str, deadline: float, with_speed: bool) -> int:
    import torch

    from benchmarks.gpu_engine import check_engine, check_loader
    from benchmarks.gpu_kernels import Finding, check_kernels
    from benchmarks.record import table

    is_small = device == "cpu"
    findings: list[Finding] = []

    def say(finding: Finding) -> None:
        mark = {True: "ok ", False: "BAD", None: "   "}[finding.is_met]
        sys.stdout.write(f"{mark} {finding.part:8} {finding.what}: {finding.measured}\n")
        sys.stdout.flush()
        findings.append(finding)

    torch.backends.cuda.matmul.allow_tf32 = False
    for finding in check_kernels(device, is_small):
        say(finding)
    for finding in check_engine(device, is_small, deadline):
        say(finding)
    for finding in check_loader(device, deadline, _INTERPRETED_BYTES if is_small else _CHECK_BYTES):
        say(finding)
    if not is_small and with_speed:
        from benchmarks.gpu_speed import measure

        for finding in measure(device, deadline):
            say(finding)
    words = {True: "yes", False: "**no**", None: "–"}
    rows = [(f.part, f.what, f.measured, f.aim, words[f.is_met]) for f in findings]
    body = table(("part", "what", "measured", "aim", "met"), rows)
    if not is_small:
        _write(device, body)
    num_bad = sum(finding.is_met is False for finding in findings)
    sys.stdout.write(f"{len(findings)} checks, {num_bad} not as aimed\n")
    return 1 if num_bad else 0


def _write(device: str, body: str) -> None:
    import torch

    from benchmarks.record import write

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", str(torch.device(device).index)]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    properties = torch.cuda.get_device_properties(device)
    memory = properties.total_memory / 2**30
    head = f"- device: {properties.name}, {memory:.0f} GiB, driver {driver}, torch {torch.__version__}"
    path = write("gpu", "On a GPU: correctness and speed", f"{head}\n\n{body}")
    sys.stdout.write(f"written to {path}\n")


if __name__ == "__main__":
    sys.exit(main())
