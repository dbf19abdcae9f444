"""Time to first token of a model scaled to zero: from SSD, from DRAM, warm; beside transformers, cold and imported.

Usage: python -m benchmarks.cold_start [--rounds 5]     Writes benchmarks/results/cold_start.md.
Rounds are interleaved, the page cache of the weights is dropped before every cold read, ours is read with direct I/O.
"""

import argparse
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.disk import direct_read_bytes_per_s, forget_pages
from nearline.client import AsyncClient
from nearline.client.commands.up import when_ready
from nearline.client.platform import PlatformConfig, running_platform

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the moon, in one sentence?"
KEEP_ALIVE_S = 0.5

RIVAL = """
import sys, time
import_started = time.perf_counter()
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
imported = time.perf_counter()
sys.path.insert(0, sys.argv[2])
from benchmarks.disk import forget_pages
from pathlib import Path
chat = [{"role": "user", "content": sys.argv[3]}]
for _ in range(2):  # the first round pays one-time costs of the libraries, the second is "already imported"
    forget_pages(Path(sys.argv[1]))
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model.generate(**inputs, max_new_tokens=1, do_sample=False)
    print(imported - import_started, time.perf_counter() - started, flush=True)
"""


async def first_token_s(client: AsyncClient, name: str) -> tuple[float, dict[str, Any]]:
    """Seconds from sending the request to the first event with text, and the platform's own timings."""
    started = time.perf_counter()
    first, timings = 0.0, dict[str, Any]()
    async for event in client.function(name).stream(QUESTION, max_tokens=2, temperature=0):
        if not first and event.get("delta"):
            first = time.perf_counter() - started
        timings = event.get("timings") or timings
    return first, timings


async def asleep(client: AsyncClient) -> None:
    """Until nothing runs and an engine is pre-warmed again."""
    while await client.admin.list("instances") or not any(n["num_prewarmed"] for n in await client.admin.list("nodes")):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)


def rival_s(directory: Path) -> tuple[float, float]:
    """(new process: interpreter, imports, load, first token; already imported: load, first token), seconds."""
    command = [sys.executable, "-c", RIVAL, str(directory), str(ROOT), QUESTION]
    forget_pages(directory)
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        from_nothing = time.perf_counter() - started
        _, imported = (float(x) for x in process.stdout.readline().split())
    return from_nothing, imported


def make_rival_directory(gguf: Path, directory: Path) -> None:
    """The same weights as a Hugging Face directory, dequantised by transformers itself."""
    code = (
        "import sys, torch\nfrom pathlib import Path\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig\n"
        "gguf, out = Path(sys.argv[1]), sys.argv[2]\n"
        "model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name,"
        " quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)\n"
        "model.save_pretrained(out)\n"
        "AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(gguf), str(directory)], check=True, stderr=subprocess.DEVNULL)


async def measure(gguf: Path, work: Path, num_rounds: int) -> dict[str, list[float]]:
    rival = work / "rival"
    make_rival_directory(gguf, rival)
    seconds: dict[str, list[float]] = {}
    config = PlatformConfig(data_dir=work / "data", port=0)
    async with running_platform(config, lambda line: None) as platform, AsyncClient(platform.url) as client:
        await when_ready(platform)
        async for _ in client.admin.add("models", {"name": "m", "source": str(gguf), "keep_alive_s": KEEP_ALIVE_S}):
            pass
        (weights,) = (work / "data").rglob("model.safetensors")
        await first_token_s(client, "m")  # the first load after an import also verifies digests
        for round_number in range(num_rounds):
            await _round(client, weights, seconds)
            from_nothing, imported = await asyncio.to_thread(rival_s, rival)
            seconds.setdefault("transformers, new process", []).append(from_nothing)
            seconds.setdefault("transformers, imported", []).append(imported)
            print(f"round {round_number + 1} of {num_rounds}:", {k: round(v[-1], 4) for k, v in seconds.items()})
    return seconds


async def _round(client: AsyncClient, weights: Path, seconds: dict[str, list[float]]) -> None:
    await asleep(client)
    await client.admin.evict("m")
    rate = await asyncio.to_thread(direct_read_bytes_per_s, weights)
    seconds.setdefault("bytes / disk bandwidth", []).append(weights.stat().st_size / rate)
    first, timings = await first_token_s(client, "m")
    assert timings["tier"] == "ssd", timings
    seconds.setdefault("nearline, from SSD", []).append(first)
    await asleep(client)
    first, timings = await first_token_s(client, "m")
    assert timings["tier"] == "dram", timings
    seconds.setdefault("nearline, from DRAM", []).append(first)
    for _ in range(10):
        first, timings = await first_token_s(client, "m")
        assert not timings["is_cold"], timings
        seconds.setdefault("nearline, warm", []).append(first)
        seconds.setdefault("front door overhead (warm)", []).append(first - timings["prefill_s"])


def report(seconds: dict[str, list[float]]) -> str:
    rows = [[name, record.spread(values)] for name, values in seconds.items()]
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ssd, dram = median["nearline, from SSD"], median["nearline, from DRAM"]
    above = ssd - median["bytes / disk bandwidth"]
    lines = [
        record.table(["SmolLM2-135M-Instruct, bf16: time to first token", "ms: median (min–max)"], rows),
        "",
        f"- from SSD: bytes/disk bandwidth + {above * 1e3:.0f} ms (aim: at most + 150 ms)",
        f"- from DRAM: {dram * 1e3:.0f} ms (aim: at most 100 ms)",
        f"- front door overhead p50: {median['front door overhead (warm)'] * 1e3:.1f} ms (aim: at most 5 ms)",
        f"- against a new transformers process: {median['transformers, new process'] / ssd:.1f} × sooner from SSD, "
        f"{median['transformers, new process'] / dram:.1f} × from DRAM",
        f"- against transformers already imported: {median['transformers, imported'] / ssd:.1f} × sooner from SSD, "
        f"{median['transformers, imported'] / dram:.1f} × from DRAM",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="nearline-bench-"))
    try:
        seconds = asyncio.run(measure(options.model.resolve(), work, options.rounds))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    text = report(seconds)
    print(text)
    print("written to", record.write("cold_start", "Cold start of a small model", text))


if __name__ == "__main__":
    main()
