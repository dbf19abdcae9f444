"""The simulator against the real thing: a live run on this machine, then the same minutes in virtual time.

Usage: python -m benchmarks.evidence.calibration [--minutes 10] [--gguf FILE]     Writes calibration.md beside it.
Three models share one slot under `nearline up`'s own processes, with requests of mixed classes. Everything the
simulation needs is measured in the same run: step times by `nearline profile`, what the front door and the links add by
requests sent before the load, bandwidths, binds and stops from the controller's journal. The journal is the trace.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import record
from benchmarks.evidence import page
from benchmarks.evidence.calibration_journal import Lived, read_lived
from benchmarks.evidence.calibration_machine import simulated
from nearline.client import AsyncClient
from nearline.client.commands.up import when_ready
from nearline.client.platform import PlatformConfig, running_platform
from nearline.protocol import StepProfile, from_plain

ROOT = Path(__file__).resolve().parent.parent.parent
SHAPES = {"wide": {"hidden_size": 768, "num_hidden_layers": 10, "intermediate_size": 2048, "heads": 12},
          "small": {"hidden_size": 384, "num_hidden_layers": 8, "intermediate_size": 1024, "heads": 6}}  # fmt: skip
RATES = {"smol": 0.22, "wide": 0.14, "small": 0.3}
CLASSES = (("interactive", 0.6), ("batch-1m", 0.3), ("batch-1h", 0.1))
WORDS = [
    "the",
    "cold",
    "engine",
    "reads",
    "its",
    "bytes",
    "from",
    "disk",
    "while",
    "a",
    "warm",
    "one",
    "answers",
    "every",
    "caller",
    "with",
    "a",
    "token",
    "at",
    "a",
    "time",
]
AIM = 0.10
KEEP_ALIVE_S = 600.0
"""Long enough for a profile, which no request keeps alive; the slot is given up to other models all the same."""

MAKE = """
import json, sys, torch
from pathlib import Path
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
gguf, out, shapes = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
for seed, (name, shape) in enumerate(shapes.items()):
    heads = shape.pop("heads")
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=heads, num_key_value_heads=heads // 3,
                         max_position_embeddings=2048, tie_word_embeddings=True, eos_token_id=2, **shape)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)
"""


def schedule(seconds: float, seed: int = 11) -> list[tuple[float, str, dict[str, Any]]]:
    """Poisson arrivals for each model: (when, model, what to ask)."""
    calls = []
    for name, rate in RATES.items():
        stream, at = Random(f"{seed}/{name}"), 0.0
        while (at := at + stream.expovariate(rate)) < seconds:
            slo = stream.choices([each for each, _ in CLASSES], [part for _, part in CLASSES])[0]
            text = " ".join(stream.choices(WORDS, k=round(stream.lognormvariate(3.8, 0.7))))
            length = _fixed(round(stream.lognormvariate(3.2, 0.6)))
            calls.append((at, name, {"prompt": text, "slo": slo, **length}))
    return sorted(calls, key=lambda call: call[0])


def _fixed(num_tokens: int) -> dict[str, Any]:
    count = max(2, min(200, num_tokens))
    return {"max_tokens": count, "min_tokens": count, "ignore_eos": True, "temperature": 0}


async def ask(client: AsyncClient, name: str, options: dict[str, Any]) -> None:
    async for _ in client.function(name).stream(None, **options):
        pass


async def warm_up(client: AsyncClient) -> None:
    """Lone requests, then six at once, of every model: what the way to an engine and its steps cost beside it. Then
    starts at the pace of the load: a processor and caches that had nothing to do make a start slower."""
    stream = Random(5)
    for name in [name for _ in range(3) for name in RATES]:
        prompts = [" ".join(stream.sample(WORDS, len(WORDS))) for _ in range(10)]
        await ask(client, name, {"prompt": prompts[0], **_fixed(4)})
        for prompt in prompts[1:4]:
            await asyncio.sleep(stream.expovariate(sum(RATES.values())))
            await ask(client, name, {"prompt": prompt, **_fixed(30)})
        await asyncio.gather(*(ask(client, name, {"prompt": prompt, **_fixed(30)}) for prompt in prompts[4:]))
    for name in [name for _ in range(12) for name in RATES]:
        await asyncio.sleep(stream.expovariate(sum(RATES.values())))
        await ask(client, name, {"prompt": " ".join(stream.sample(WORDS, len(WORDS))), **_fixed(10)})


async def live(models: dict[str, Path], work: Path, minutes: float) -> Lived:
    """Run the load for real."""
    profiles: dict[str, StepProfile] = {}
    config = PlatformConfig(data_dir=work / "data", port=0, agent_args=("--slots", "1", "--prewarm", "1"))
    async with running_platform(config, lambda line: None) as platform, AsyncClient(platform.url) as client:
        await when_ready(platform)
        for name, source in models.items():
            model = {"name": name, "source": str(source), "keep_alive_s": KEEP_ALIVE_S}
            async for _ in client.admin.add("models", model):
                pass
        for name in models:
            async for event in client.admin.profile(name):
                if "phase" not in event:
                    kept = {key: value for key, value in event.items() if key not in ("id", "node")}
                    profiles[name] = from_plain(StepProfile, kept)
        await warm_up(client)
        await asyncio.sleep(2.0)
        begun_at = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, name, options in schedule(60.0 * minutes):
                await asyncio.sleep(max(0.0, begun_at + at - time.monotonic()))
                group.create_task(ask(client, name, options))
        await asyncio.sleep(0.5)
    return read_lived(work / "data" / "controller" / "journal", profiles, begun_at)


def compare(lived: Lived) -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether the aim is met."""
    real, virtual = lived.measured(), simulated(lived)
    rows, is_met = [], True
    for name, key in (("mean TTFT, s", "mean"), ("p90 TTFT, s", "p90"), ("swaps", "swaps")):
        error = virtual[key] / real[key] - 1.0
        is_met = is_met and abs(error) <= AIM
        rows.append([name, f"{real[key]:.3f}", f"{virtual[key]:.3f}", f"{100 * error:+.1f} %",
                     "met" if abs(error) <= AIM else "missed"])  # fmt: skip
    for name, key in (("p50 TTFT, s", "p50"), ("mean time per output token, s", "tpot"), ("starts", "starts"),
                      ("mean E2E, s", "e2e")):  # fmt: skip
        rows.append([name, f"{real[key]:.3f}", f"{virtual[key]:.3f}", f"{100 * (virtual[key] / real[key] - 1):+.1f} %",
                     "–"])  # fmt: skip
    return rows, is_met


def write(lived: Lived, minutes: float, more: str = "") -> Path:
    rows, is_met = compare(lived)
    verdict = f"Aim: within 10 % on mean and p90 time to first token and on swaps: {'met' if is_met else 'missed'}."
    about = [f"{name}: {cost}" for name, cost in lived.described().items()]
    machine = (
        f"Machine: {record.machine()}. {lived.num_requests} requests in {minutes:g} minutes; one slot, three models."
    )
    parts = [
        machine,
        record.table(["", "live", "simulated", "error", "aim"], rows),
        verdict,
        "Measured in the same run and given to the simulation:",
        "\n".join(f"- {line}" for line in about),
    ]
    command = f"python -m benchmarks.evidence.calibration --minutes {minutes:g}{more}"
    return page.write("calibration", "The simulator against a live run", command, parts)


def main(arguments: Sequence[str]) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--gguf", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="also keep what was measured, to simulate it again")
    parser.add_argument("--again", type=Path, metavar="FILE", help="simulate a run that was kept, without a live one")
    options = parser.parse_args(arguments)
    if options.again is not None:
        return write(Lived.kept(options.again), options.minutes, " --keep FILE; simulated anew with --again FILE")
    work = Path(tempfile.mkdtemp(prefix="nearline-calibration-"))
    try:
        gguf = options.gguf.resolve()
        subprocess.run([sys.executable, "-c", MAKE, str(gguf), str(work), json.dumps(SHAPES)], check=True)
        models = {"smol": gguf, **{name: work / name for name in SHAPES}}
        lived = asyncio.run(live(models, work, options.minutes))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if options.keep is not None:
        lived.save(options.keep)
    return write(lived, options.minutes)


if __name__ == "__main__":
    print(main(sys.argv[1:]))
