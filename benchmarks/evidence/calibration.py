"""The simulator against the real thing: a live run on this machine, then the same minutes in virtual time.

Usage: python -m benchmarks.evidence.calibration [--minutes 10] [--gguf FILE]     Writes calibration.md beside it.
Three models share one slot (`--slots`) under `nearline up`'s own processes, with requests of mixed classes. What the
simulation knows of the machine is measured before the load: step times by `nearline profile`; what the front door, the
links and streaming add, and how long starts and stops take, by other requests, read from the controller's journal. Of
the load it is given when requests came and how long they were. `--keep` and `--again` simulate a run once more.
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
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.evidence import calibration_page
from benchmarks.evidence.calibration_journal import SIX, Lived, keep, read_lived
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
KEEP_ALIVE_S = 600.0
"""Long enough for a profile, which no request keeps alive; the slot is given up to other models all the same."""

PILOT_S = 120.0
"""How long the warm-up ends with traffic as the load's."""

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


def schedule(seconds: float, seed: int) -> list[tuple[float, str, dict[str, Any]]]:
    """Poisson arrivals for each model: (when, model, what to ask)."""
    calls = []
    for name, rate in RATES.items():
        stream, at = Random(f"{seed}/{name}"), 0.0
        while (at := at + stream.expovariate(rate)) < seconds:
            slo = stream.choices([each for each, _ in CLASSES], [part for _, part in CLASSES])[0]
            length = _fixed(round(stream.lognormvariate(3.2, 0.6)))
            calls.append((at, name, {"prompt": _text(stream), "slo": slo, **length}))
    return sorted(calls, key=lambda call: call[0])


def _text(stream: Random) -> str:
    return " ".join(stream.choices(WORDS, k=round(stream.lognormvariate(3.8, 0.7))))


def _fixed(num_tokens: int) -> dict[str, Any]:
    count = max(2, min(200, num_tokens))
    return {"max_tokens": count, "min_tokens": count, "ignore_eos": True, "temperature": 0}


async def ask(client: AsyncClient, name: str, options: dict[str, Any]) -> None:
    async for _ in client.function(name).stream(None, **options):
        pass


async def warm_up(client: AsyncClient, num_slots: int) -> None:
    """Lone requests, then six at once, of every model: what the way to an engine and its steps cost beside it, the
    second one when an engine without work is busy with itself. Then traffic as the load's, with starts as it has
    them: a processor and caches that had nothing to do make a start slower."""
    stream = Random(5)
    for name in [name for _ in range(3) for name in RATES]:
        await ask(client, name, {"prompt": _text(stream), **_fixed(4)})
        await asyncio.sleep(1.05)
        await ask(client, name, {"prompt": _text(stream), **_fixed(4)})
        for _ in range(3):
            await asyncio.sleep(stream.expovariate(sum(RATES.values())))
            await ask(client, name, {"prompt": _text(stream), **_fixed(30)})
        await asyncio.gather(*(ask(client, name, {"prompt": _text(stream), **_fixed(30)}) for _ in range(SIX)))
    for one, other in permutations(RATES, 2) if num_slots > 1 else ():
        beside = asyncio.create_task(ask(client, other, {"prompt": _text(stream), **_fixed(150)}))
        await asyncio.sleep(0.5)
        await ask(client, one, {"prompt": _text(stream), **_fixed(30)})
        await beside
    await play(client, schedule(PILOT_S, seed=5))
    await asyncio.sleep(2.0)


async def play(client: AsyncClient, calls: list[tuple[float, str, dict[str, Any]]]) -> float:
    """Ask everything when it is due, wait for all answers, and return when it began."""
    begun_at = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for at, name, options in calls:
            await asyncio.sleep(max(0.0, begun_at + at - time.monotonic()))
            group.create_task(ask(client, name, options))
    return begun_at


def cpu_s() -> tuple[float, float, float]:
    """Return now, and the processor seconds that all have used and that this run's processes have."""
    times = psutil.cpu_times()
    own = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            own += sum(process.cpu_times()[:4])
    return time.monotonic(), times.user + times.nice + times.system + times.irq + times.softirq + times.steal, own


def others_share(since: tuple[float, float, float], until: tuple[float, float, float]) -> float:
    """What part of the machine was used by others meanwhile."""
    passed_s, all_s, own_s = (b - a for a, b in zip(since, until, strict=True))
    return max(0.0, all_s - own_s) / (passed_s * (psutil.cpu_count() or 1))


async def live(models: dict[str, Path], work: Path, minutes: float, num_slots: int) -> Path:
    """Run the load for real. Returns the directory of the journal."""
    profiles: dict[str, StepProfile] = {}
    config = PlatformConfig(data_dir=work / "data", port=0, agent_args=("--slots", str(num_slots), "--prewarm", "1"))
    async with running_platform(config, lambda line: None) as platform, AsyncClient(platform.url) as client:
        await when_ready(platform)
        for name, source in models.items():
            model = {"name": name, "source": str(source), "keep_alive_s": KEEP_ALIVE_S}
            async for _ in client.admin.add("models", model):
                pass
        before = cpu_s()
        for name in models:
            async for event in client.admin.profile(name):
                if "phase" not in event:
                    kept = {key: value for key, value in event.items() if key not in ("id", "node")}
                    profiles[name] = from_plain(StepProfile, kept)
        await warm_up(client, num_slots)
        between = cpu_s()
        begun_at = await play(client, schedule(60.0 * minutes, seed=11))
        await asyncio.sleep(0.5)
        after = cpu_s()
    journal = work / "data" / "controller" / "journal"
    keep(journal, profiles, begun_at, [others_share(before, between), others_share(between, after)])
    return journal


def main(arguments: Sequence[str]) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slots", type=int, default=1, help="how many instances at once, on the same cores")
    parser.add_argument("--gguf", type=Path, default=ROOT / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="also keep the journal, to simulate it again")
    parser.add_argument("--again", type=Path, metavar="DIR", help="simulate a run that was kept, without a live one")
    options = parser.parse_args(arguments)
    if options.again is not None:
        lived = read_lived(options.again)
        return calibration_page.write(lived, f"{_command(lived)} --keep DIR; simulated anew with --again DIR")
    work = Path(tempfile.mkdtemp(prefix="nearline-calibration-"))
    try:
        gguf = options.gguf.resolve()
        subprocess.run([sys.executable, "-c", MAKE, str(gguf), str(work), json.dumps(SHAPES)], check=True)
        models = {"smol": gguf, **{name: work / name for name in SHAPES}}
        journal = asyncio.run(live(models, work, options.minutes, options.slots))
        if options.keep is not None:
            shutil.copytree(journal, options.keep, dirs_exist_ok=True)
        lived = read_lived(journal)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return calibration_page.write(lived, _command(lived))


def _command(lived: Lived) -> str:
    num_slots = sum(device.num_slots for device in lived.report.devices)
    slots = f" --slots {num_slots}" if num_slots > 1 else ""
    return f"python -m benchmarks.evidence.calibration --minutes {round(lived.load_s / 30) / 2:g}{slots}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
