"""Unmerged, merged or dynamic: the shape of dLoRA's figure 10, served by real engines in each mode.

The skew is as published: functions, most called first, are dealt to 8 adapters in strides, so a greater stride gives
one adapter more of the traffic. Requests follow the order in which the sample's functions were called, at Poisson
arrivals. Source: dLoRA (OSDI 2024), figure 10; the 199 calls of 31 functions in vHive invitro's sample of the Azure
Functions trace of 2021 (CC-BY 4.0): letters are functions, by how often they were called.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.multi_lora_engine import Arrival, MiniEngine, Outcome, prompt
from nearline.engine.config import MergeMode
from nearline.protocol import Digest, Seconds

Mode = MergeMode | None
"""None: the same requests without adapters, by the unmerged engine: merging cannot make steps quicker than that."""
MODES: tuple[Mode, ...] = (MergeMode.NEVER, MergeMode.ALWAYS, MergeMode.AUTO, None)
LOAD = 0.7
_SWITCHING_BYTES = 3600 << 20
"""Of KV memory: half of it holds a merged copy of the base for each of the eight adapters."""
_CALLS = (
    "IWQJKGDMLENXOPYCSTUZabFRAAAAAAAAAAAAAAAABVCQBRVBQCEDFRBHCDEGBBCDEcFBBMNCLDOPEJKIBHCGFBBCDEBBCDEFBHCG"
    "DEBBDLOMEJdKICSUTPNFBAAAAAAAAAAAAAAAACBBBHCGFEDBCDEBBDECFBHICLENPODJGeKMBBCFBCBEDBHCEGDFBBCDEBICKJL"
)
_FUNCTIONS = sorted(set(_CALLS))


@dataclass(slots=True)
class Switching:
    """Outcomes by stride and mode, one of each round. `requests_per_s`: the load that was offered."""

    outcomes: dict[tuple[int, Mode], list[Outcome]] = field(default_factory=dict)
    requests_per_s: float = 0.0


def measure(directory: Path, digests: Sequence[Digest], strides: Sequence[int], size: tuple[int, int]) -> Switching:
    """`size`: requests in a round, and rounds. The modes take turns in every round, of the same arrivals.

    At a share of the requests per second that the unmerged engine carries when all are there at once. All engines have
    served before, but merged nothing: the first round pays for the copies.
    """
    found = Switching()
    count, num_rounds = size
    engines = {mode: _engine(directory, digests, mode, count) for mode in MODES if mode is not None}
    at_once = [engines[MergeMode.NEVER].run(arrivals(digests, strides[0], count, 0.0, turn)) for turn in range(2)]
    found.requests_per_s = LOAD * count / min(outcome.seconds for outcome in at_once)
    for turn in range(num_rounds):
        for stride in strides:
            trace = arrivals(digests, stride, count, 1.0 / found.requests_per_s, turn)
            for mode in (*MODES[turn % len(MODES) :], *MODES[: turn % len(MODES)]):
                found.outcomes.setdefault((stride, mode), []).append(_run(engines, mode, trace))
    return found


def arrivals(digests: Sequence[Digest], stride: int, count: int, gap_s: Seconds, turn: int) -> list[Arrival]:
    """`count` requests, `gap_s` apart in the mean; every turn goes on where the one before ended."""
    draw, at, made = random.Random(f"{stride}/{turn}"), 0.0, []
    for index in range(turn * count, (turn + 1) * count):
        at += draw.expovariate(1.0 / gap_s) if gap_s else 0.0
        function = _FUNCTIONS.index(_CALLS[index % len(_CALLS)])
        adapter = digests[function // stride % len(digests)]
        made.append(Arrival(at, adapter, prompt(draw, 24), 16 + draw.randrange(17)))
    return made


def _engine(directory: Path, digests: Sequence[Digest], mode: MergeMode, count: int) -> MiniEngine:
    """An engine whose adapters are there, whose code has run and whose memory was touched, without merging."""
    engine = MiniEngine(directory, _SWITCHING_BYTES, mode)
    engine.load(digests)
    engine.run(_plain(arrivals(digests, 1, count, 0.0, 0)))
    return engine


def _run(engines: dict[MergeMode, MiniEngine], mode: Mode, trace: list[Arrival]) -> Outcome:
    if mode is None:
        return engines[MergeMode.NEVER].run(_plain(trace))
    return engines[mode].run(trace)


def _plain(trace: Sequence[Arrival]) -> list[Arrival]:
    """The same requests without adapters."""
    return [Arrival(one.at, None, one.prompt, one.num_tokens) for one in trace]
