"""Recorded traffic: Azure LLM inference (csv), Mooncake (jsonl), VTC run files (jsonl), ServeGen clients (directories).

What a trace does not say (which model, which tenant) is drawn with independent seeded streams, so that a trace spreads
over a fleet the same way in every run.
Source: column names of AzurePublicDataset (AzureLLMInferenceTrace), Mooncake's FAST25 traces, VTC-artifact results.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random

from nearline.protocol import ModelId, Seconds, TenantId
from nearline.simulator.arrivals import BATCH_1M, Arrival, model_ids
from nearline.simulator.servegen import servegen

_MOONCAKE_TICK_S = 3.0
_ANY = model_ids(1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a trace's requests are dealt out: models by a Zipf law, tenants evenly, time divided by `speedup`; a part
    `batch_part` is of class batch-1m. `seconds` is how much of a ServeGen client's days is drawn."""

    models: tuple[ModelId, ...]
    seed: int
    zipf: float = 1.0
    num_tenants: int = 1
    speedup: float = 1.0
    max_requests: int | None = None
    batch_part: float = 0.0
    seconds: Seconds = 600.0


def read_trace(path: Path, spread: Spread) -> list[Arrival]:
    """Read a trace of any known format, dealt out over models and tenants, in order of time from 0.

    Raises ValueError naming the file when its format is not known.
    """
    found = servegen(path, spread.seconds, spread.seed) if path.is_dir() else _rows(path, spread.seed)
    rows = sorted(found, key=lambda arrival: arrival.at)[: spread.max_requests]
    start = rows[0].at if rows else 0.0
    weights = list(accumulate(1.0 / (rank + 1) ** spread.zipf for rank in range(len(spread.models))))
    models, tenants, classes = (Random(f"{spread.seed}/trace {name}") for name in ("model", "tenant", "class"))
    dealt = []
    for row in rows:
        (model_id,) = models.choices(spread.models, cum_weights=weights)
        tenant = TenantId(f"t{tenants.randrange(spread.num_tenants)}") if spread.num_tenants > 1 else row.tenant
        slo = BATCH_1M if classes.random() < spread.batch_part else row.slo
        at = (row.at - start) / spread.speedup
        dealt.append(replace(row, at=at, model_id=model_id, tenant=tenant, slo=slo))
    return dealt


def _rows(path: Path, seed: int) -> Iterator[Arrival]:
    with path.open() as file:
        head = file.readline()
        file.seek(0)
        if head.startswith("TIMESTAMP,"):
            yield from (_azure(row) for row in csv.DictReader(file))
            return
        first = json.loads(head) if head.startswith("{") else {}
        if "hash_ids" in first:
            jitter = Random(f"{seed}/tick")
            yield from (_mooncake(json.loads(line), jitter) for line in file if line.strip())
        elif "responses" in first.get("result", {}):
            yield from (_vtc(row) for row in first["result"]["responses"])
        else:
            known = "an Azure LLM csv, a Mooncake jsonl, a VTC jsonl file or a ServeGen directory"
            raise ValueError(f"{path}: not a known trace; give {known}")


def _azure(row: dict[str, str]) -> Arrival:
    whole, _, fraction = row["TIMESTAMP"].partition(".")
    at = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
    return Arrival(at, _ANY, max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])))


def _mooncake(row: dict[str, float | list[int]], jitter: Random) -> Arrival:
    """Timestamps stand on ticks of three seconds; arrivals lie somewhere inside their tick."""
    at = float(row["timestamp"]) / 1e3 + jitter.random() * _MOONCAKE_TICK_S  # type: ignore[arg-type]
    hashes = row["hash_ids"]
    prefix = 1 + hashes[0] if isinstance(hashes, list) and hashes else 0
    sizes = (max(1, int(row["input_length"])), max(1, int(row["output_length"])))  # type: ignore[arg-type]
    return Arrival(at, _ANY, *sizes, prefix_hash=prefix)


def _vtc(row: dict[str, float | str]) -> Arrival:
    sizes = (max(1, int(row["prompt_len"])), max(1, int(row["output_len"])))
    return Arrival(float(row["req_time"]), _ANY, *sizes, tenant=TenantId(str(row["adapter_dir"])))
