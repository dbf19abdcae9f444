"""Recorded traffic: Azure LLM inference (csv), Mooncake (jsonl) and VTC run files (jsonl), as arrivals.

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

from nearline.protocol import Seconds, TenantId
from nearline.simulator.arrivals import Arrival, model_ids

_MOONCAKE_TICK_S = 3.0
_ANY = model_ids(1)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a trace's requests are dealt out: models by a Zipf law, tenants evenly, time divided by `speedup`."""

    num_models: int
    seed: int
    zipf: float = 1.0
    num_tenants: int = 1
    speedup: float = 1.0
    max_requests: int | None = None


def read_trace(path: Path, spread: Spread) -> list[Arrival]:
    """Read a trace of any known format, dealt out over models and tenants, in order of time from 0.

    Raises ValueError naming the file when its format is not known.
    """
    rows = sorted(_rows(path, spread.seed), key=lambda arrival: arrival.at)[: spread.max_requests]
    start = rows[0].at if rows else 0.0
    names = model_ids(spread.num_models)
    weights = list(accumulate(1.0 / (rank + 1) ** spread.zipf for rank in range(spread.num_models)))
    models, tenants = (Random(f"{spread.seed}/{name}") for name in ("trace model", "trace tenant"))
    found = []
    for row in rows:
        (model_id,) = models.choices(names, cum_weights=weights)
        tenant = TenantId(f"t{tenants.randrange(spread.num_tenants)}") if spread.num_tenants > 1 else row.tenant
        found.append(replace(row, at=(row.at - start) / spread.speedup, model_id=model_id, tenant=tenant))
    return found


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
            raise ValueError(f"{path}: not a known trace; give an Azure LLM csv, a Mooncake jsonl or a VTC jsonl file")


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


def mean_rate_per_s(arrivals: list[Arrival]) -> float:
    span: Seconds = arrivals[-1].at - arrivals[0].at if arrivals else 0.0
    return len(arrivals) / span if span else 0.0
