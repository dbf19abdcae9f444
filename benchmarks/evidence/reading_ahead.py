"""Should reading an adapter ahead take the place of an idle one that is worth less? Misses and reads, both ways.

Usage: python -m benchmarks.evidence.reading_ahead
The engine's own `AdapterTable` decides, asked as the controller asks (`to_prepare`, every 10 s, again after an
eviction). The control evicts an idle adapter, never a pinned one, for one whose own value, the table's, is higher.
Requests are Poisson, popularity is Zipf's, answers take 3 s on average. Writes benchmarks/evidence/reading_ahead.md.
"""

import heapq
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.evidence import page
from nearline.controller.policy.adapters import AdapterTraffic, to_prepare
from nearline.engine.adapters import AdapterAction, AdapterState, AdapterTable, ReadAdapter
from nearline.engine.sequence import Sequence
from nearline.protocol import Digest, ModelId, Request, RequestId

SECONDS, ASK_S, ANSWER_S, SEEDS = 6000.0, 10.0, 3.0, range(3)
LEAST_TRAFFIC, MAX_ASKED, NUM_BYTES = 1.5, 16, 10


@dataclass(frozen=True, slots=True)
class Workload:
    """`shift_s`: popularity is dealt out anew this often; 0: never."""

    places: int
    adapters: int
    zipf: float
    per_s: float
    shift_s: float = 0.0


WORKLOADS = (
    Workload(16, 100, 1.0, 1.0), Workload(16, 40, 1.0, 1.0), Workload(32, 200, 1.0, 2.0), Workload(16, 100, 0.7, 1.0),
    Workload(16, 100, 1.2, 0.3), Workload(16, 100, 1.0, 1.0, 900.0), Workload(32, 200, 1.2, 2.0, 600.0),
    Workload(16, 30, 0.0, 1.0), Workload(8, 100, 1.0, 0.5, 1200.0),
)  # fmt: skip


class Replacing(AdapterTable):
    """Reads ahead into the place of an idle adapter of less value when none is free."""

    def _read_ahead(self) -> list[AdapterAction]:
        ahead = [a for a in self._adapters.values() if a.is_ahead and a.state is AdapterState.ABSENT]
        victim = self._victim(None, is_per_byte=False) if ahead and self._is_full() else None
        if victim is None or victim.joined or victim.heat >= ahead[0].heat:
            return super()._read_ahead()
        return [self._evict(victim), *super()._read_ahead()]


class Engine:
    """One engine's table, and the controller that asks it; reads take no time."""

    def __init__(self, load: Workload, table: AdapterTable, seed: int) -> None:
        self._load, self._table, self._draw = load, table, random.Random(seed)
        self._traffic = AdapterTraffic()
        self._asked: dict[Digest, None] = {}
        self._order = list(range(load.adapters))
        self._weights = [(rank + 1) ** -load.zipf for rank in self._order]
        self._ends: list[tuple[float, int, Sequence]] = []
        self.num_calls = self.num_hits = self.num_reads = 0

    def run(self) -> None:
        arrival, ask, never = self._draw.expovariate(self._load.per_s), ASK_S, float("inf")
        shift = self._load.shift_s or never
        while (now := min(arrival, ask, shift, self._ends[0][0] if self._ends else never)) < SECONDS:
            if now == shift:
                self._draw.shuffle(self._order)
                shift += self._load.shift_s
            elif now == ask:
                self._ask(now)
                ask += ASK_S
            elif now == arrival:
                self._call(now)
                arrival = now + self._draw.expovariate(self._load.per_s)
            else:
                self._table.leave(heapq.heappop(self._ends)[2], now)
            self._settle(now)

    def _call(self, now: float) -> None:
        digest = Digest(str(self._order[self._draw.choices(range(self._load.adapters), self._weights)[0]]))
        self.num_calls += 1
        request = Request(RequestId(str(self.num_calls)), ModelId("m"), (1,), adapter_digest=digest)
        sequence = Sequence(request, 0, [1], now, serial=self.num_calls)
        self._traffic.note(digest, now)
        self._table.announce(digest, "")
        self.num_hits += self._table.join(sequence)
        self._settle(now)
        if self._table.can_start(sequence):
            self._table.pin(sequence)
        heapq.heappush(self._ends, (now + self._draw.expovariate(1 / ANSWER_S), self.num_calls, sequence))

    def _ask(self, now: float) -> None:
        traffic = self._traffic.expected(now)
        here = [digest for digest in traffic if self._table.is_placed(digest)]
        known = {**self._asked, **dict.fromkeys(here)}
        for digest in to_prepare(traffic, traffic, known, self._load.adapters, LEAST_TRAFFIC)[:MAX_ASKED]:
            self._asked[digest] = None
            self._table.announce(digest, "", is_ahead=True)

    def _settle(self, now: float) -> None:
        while actions := self._table.plan():
            for action in actions:
                if isinstance(action, ReadAdapter):
                    self.num_reads += 1
                    self._table.loaded(action.digest, NUM_BYTES, now)
                else:
                    self._asked.pop(action.digest, None)


def measured(load: Workload, kind: type[AdapterTable]) -> tuple[float, float]:
    """Share of the calls that found their adapter there, and reads per call."""
    engines = [Engine(load, kind(load.places, 1 << 40), seed) for seed in SEEDS]
    for engine in engines:
        engine.run()
    hits = fmean(engine.num_hits / engine.num_calls for engine in engines)
    return hits, fmean(engine.num_reads / engine.num_calls for engine in engines)


WHY = f"""Hits: calls whose adapter was there; means of {len(SEEDS)} seeds, {SECONDS:,.0f} s each. In steady traffic the
places are always taken, so what is read ahead there takes another's: what it saves is nearly what it costs, and it
reads far more, beside steps that run. So an engine reads ahead only into free places."""


def main() -> Path:
    rows = []
    for load in WORKLOADS:
        free, replacing = measured(load, AdapterTable), measured(load, Replacing)
        shift = f"every {load.shift_s:g} s" if load.shift_s else "never"
        what = f"| {load.places} | {load.adapters} | {load.zipf:g} | {load.per_s:g} | {shift} "
        rows.append(f"{what}| {free[0]:.3f} | {replacing[0]:.3f} | {free[1]:.3f} | {replacing[1]:.3f} |")
    head = "| places | adapters | Zipf | calls/s | popularity changes | hits, free places only | hits, replacing "
    head += "| reads per call, free | reads per call, replacing |\n|---|---|---|---|---|---|---|---|---|"
    command = "python -m benchmarks.evidence.reading_ahead"
    title = "Reading adapters ahead: into free places only, or in the place of idle ones"
    return page.write("reading_ahead", title, command, ["\n".join([head, *rows]), WHY])


if __name__ == "__main__":
    print(main())
