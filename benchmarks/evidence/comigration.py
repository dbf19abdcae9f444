"""Requests and adapters that move between replicas: dLoRA's figure 11 (a), the time spent waiting.

Usage: python -m benchmarks.evidence.comigration     Writes benchmarks/evidence/comigration.md.
8 replicas of one 7B model on 8 machines, 16 places each, 32 adapters of Zipf popularity; the bytes of each lie on two
of the machines, so its requests can run there alone, as in dLoRA an adapter's do where it was placed. Arrivals are
gamma (CV 2). Engines that answer by pace (a move computes prompt and answer again). Four ways: round robin over the
machines that have the adapter; ours without any move; ours with moves of what has no token yet; ours.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks import record
from benchmarks.evidence import page
from nearline.controller import CoreConfig, Event
from nearline.controller.events import AdapterAdded, RequestArrived
from nearline.controller.policy import dispatch, migration
from nearline.protocol import AdapterSpec, CheckpointInfo, CheckpointKind, Digest, ModelId, Residency, TenantId
from nearline.simulator import Arrival, Machine, SimulatedModel, Simulation, add_models, make_core, make_fleet
from nearline.simulator.cost_model import CostModel
from nearline.simulator.fleet import GB
from nearline.simulator.node import SimulatedNode
from nearline.simulator.report import summary

NUM_REPLICAS, NUM_ADAPTERS, NUM_HOMES, NUM_REQUESTS, NUM_SEEDS = 8, 32, 2, 1500, 6
RATES = (6.0, 8.0, 10.0, 12.0, 14.0)
ADAPTER_BYTES, MANY = 40 * 10**6, 100_000
WAYS = ("round robin", "nothing moves", "what has no token", "ours")
PUBLISHED = {"proactive placement only": "0.017 0.185 0.837 2.15 3.05 6.62 7.38",
             "with reactive co-migration": "0.023 0.082 0.214 0.605 0.936 1.36 1.83"}  # fmt: skip
WHY = """Time to first token, s: mean / p99, means over {seeds} seeds of {requests:,} requests; `moves` counts those of
ours, and of them those with tokens. Published (8 GPUs, queueing time at rates of 8 to 32 per second): proactive
placement only {before}; with co-migration {after}: up to 4.9 times less. Its engines are sent every request on
arrival, so what co-migration repairs is mostly an early choice; ours are sent a request when a place is free, which is
why the step from round robin to `nothing moves` is the large one here and that from there to `ours` the small one.
What is left is what only moves can do: a place for somebody who can run on two machines alone, taken by an answer that
could run elsewhere. End-to-end times are given because moves cost: the tokens of a moved answer are computed again."""


class Adapted(Simulation):
    """Requests of a tenant `loraN` are requests of that adapter."""

    def post(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            name = event.info.tenant
            adapter = {"adapter_id": ModelId(name), "adapter_digest": Digest(name), "tenant": TenantId("default")}
            event = RequestArrived(replace(event.info, **adapter))
        super().post(event)


class Keeper:
    """A node's report, with the adapters whose bytes lie there."""

    def __init__(self, node: SimulatedNode, names: list[str]) -> None:
        self._report = node.report
        self._rows = tuple(Residency(Digest(name), ADAPTER_BYTES, ADAPTER_BYTES, ADAPTER_BYTES) for name in names)

    def __call__(self) -> Any:
        report = self._report()
        return replace(report, residency=report.residency + self._rows)


def traffic(rate: float, seed: int, model_id: ModelId) -> Iterator[Arrival]:
    stream, at = Random(f"comigration/{seed}"), 30.0
    shares = [1.0 / (k + 1) for k in range(NUM_ADAPTERS)]
    stream.shuffle(shares)
    names = [TenantId(f"lora{k}") for k in range(NUM_ADAPTERS)]
    for _ in range(NUM_REQUESTS):
        at += stream.gammavariate(0.25, 4.0 / rate)
        prompt, answer = stream.lognormvariate(5.0, 1.0), stream.lognormvariate(5.3, 0.8)
        sizes = (max(1, min(3000, round(prompt))), max(1, min(2000, round(answer))))
        yield Arrival(at, model_id, *sizes, stream.choices(names, shares)[0])


@contextmanager
def decided_by(way: str) -> Iterator[None]:
    """Put a way's decisions in place of ours."""
    turns = count()

    def in_turn(roomy: Any, request: Any, config: Any) -> Any:
        able = [i for i in roomy if i.node.holds(request.info.adapter_digest)]
        return dispatch.Choice(able[next(turns) % len(able)].instance_id, "its turn") if able else None

    if way == "round robin":
        with patch.object(dispatch, "choose", in_turn):
            yield
    elif way == "what has no token":
        with patch.object(migration, "make_room", lambda *_: None), patch.object(migration, "go_on", lambda *_: None):
            yield
    else:
        yield


def run(rate: float, seed: int, way: str) -> tuple[list[float], dict[str, int]]:
    """Return mean and p99 of the time to first token and end to end, and what the core decided."""
    machine = Machine(cost=CostModel(max_running=16, kv_tokens=30_000), dram_bytes=40 * GB)
    spec = {"min_replicas": NUM_REPLICAS, "max_replicas": NUM_REPLICAS, "keep_alive_s": -1.0}
    models = add_models("m", 1, SimulatedModel(num_bytes=14 * GB), **spec)
    fleet = make_fleet({f"n{n}": machine for n in range(NUM_REPLICAS)}, models)
    nodes = list(fleet.nodes())
    for n, node in enumerate(nodes):
        held = [f"lora{k}" for k in range(NUM_ADAPTERS) if n in ((k + 3 * j) % NUM_REPLICAS for j in range(NUM_HOMES))]
        node.report = Keeper(node, held)  # type: ignore[method-assign]
    headroom = MANY if way == "round robin" else CoreConfig().dispatch_headroom
    config = CoreConfig(dispatch_headroom=headroom, max_held_per_model=MANY, max_held_total=MANY, max_wait_targets=1e6,
                        max_moves=0 if way in WAYS[:2] else CoreConfig().max_moves)  # fmt: skip
    simulation = Adapted(make_core("nearline", config), fleet.specs, nodes)
    model_id = models[0][0].model_id
    for k in range(NUM_ADAPTERS):
        info = CheckpointInfo(Digest(f"lora{k}"), CheckpointKind.ADAPTER, ADAPTER_BYTES, "", "", "", "", ())
        simulation.post(AdapterAdded(AdapterSpec(ModelId(f"lora{k}"), model_id, info, 0.0)))
    with decided_by(way):
        outcome = simulation.run(traffic(rate, seed, model_id))
    first, whole = summary(outcome.ttft_s), summary(outcome.e2e_s)
    return [first["mean"], first["p99"], whole["mean"], whole["p99"]], simulation.core.decisions()


def main() -> Path:
    firsts, wholes = [], []
    for rate in RATES:
        first, whole, moves = [f"{rate:g}"], [f"{rate:g}"], ""
        for way in WAYS:
            found = [run(rate, seed, way) for seed in range(NUM_SEEDS)]
            means = [sum(times[n] for times, _ in found) / NUM_SEEDS for n in range(4)]
            first.append(f"{means[0]:.3f} / {means[1]:.2f}")
            whole.append(f"{means[2]:.2f} / {means[3]:.1f}")
            moves = f"{sum(d['moved'] for _, d in found)}, {sum(d['migrated'] for _, d in found)}"
        firsts.append([*first, moves])
        wholes.append(whole)
    header = ["requests/s", *WAYS]
    why = WHY.format(seeds=NUM_SEEDS, requests=NUM_REQUESTS, before=PUBLISHED["proactive placement only"],
                     after=PUBLISHED["with reactive co-migration"])  # fmt: skip
    parts = [record.table([*header, "moves"], firsts), "End to end, s.", record.table(header, wholes), why]
    title = "Requests and adapters that move (figure 11 of dLoRA)"
    return page.write("comigration", title, "python -m benchmarks.evidence.comigration", parts)


if __name__ == "__main__":
    print(main())
