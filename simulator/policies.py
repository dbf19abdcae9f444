"""Who decides in a simulation, by name: Nearline as it runs live, and single ideas to compare it with. Pure.

Every policy drives the same core, so all of them pull, drain, preload and resume alike; what is exchanged is the order
of requests, the order of models that want a slot, the place, and numbers of the core's config.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from nearline.controller import ControllerCore, CoreConfig
from nearline.controller.advice import Adviser
from nearline.controller.choices import Choices, Place
from nearline.controller.policy import placement
from nearline.controller.policy.placement import MayStop, Need, NoPlace, Placement
from nearline.controller.policy.views import NodeView
from nearline.controller.queues import RequestRecord, VirtualQueue
from nearline.controller.state import ModelRecord
from nearline.protocol import InstanceId, Seconds

_SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`make_choices` is called once per run: some choices remember. `numbers` replace those of CoreConfig."""

    about: str
    make_choices: Callable[[], Choices] = Choices
    numbers: dict[str, Any] = field(default_factory=dict)


def make_core(name: str, config: CoreConfig) -> ControllerCore:
    """Make a core that decides by a policy. Numbers that were set in `config` stay. Raises KeyError."""
    policy, usual = POLICIES[name], CoreConfig()
    free = {key: value for key, value in policy.numbers.items() if getattr(config, key) == getattr(usual, key)}
    return ControllerCore(replace(config, **free), policy.make_choices())


class _ByArrival(VirtualQueue):
    def candidates(self, now: Seconds) -> Iterator[RequestRecord]:
        heads = (group.head() for group in self.busy_groups.values())
        return iter(sorted(heads, key=lambda request: request.order))


class _ByDueDate(VirtualQueue):
    def candidates(self, now: Seconds) -> Iterator[RequestRecord]:
        heads = (group.head() for group in self.busy_groups.values())
        return iter(sorted(heads, key=lambda request: (request.due_at, request.order)))


class _Shortest(VirtualQueue):
    def candidates(self, now: Seconds) -> Iterator[RequestRecord]:
        heads = (group.head() for group in self.busy_groups.values())
        return iter(sorted(heads, key=lambda request: (request.length_bucket, request.order)))


class _Fair(VirtualQueue):
    """Virtual counters over tenants; a tenant's requests of all classes and lengths by arrival."""

    def candidates(self, now: Seconds) -> Iterator[RequestRecord]:
        heads = [head for group in self.busy_groups.values() for head in group.heads()]
        first: dict[Any, RequestRecord] = {}
        for _, head in sorted(heads, key=lambda pair: pair[1].order):
            first.setdefault(head.info.tenant, head)
        counters: dict[Any, float] = dict.fromkeys(first, 0.0)
        for tenant in first:
            counters[tenant] = sum(each.counter(tenant) for each in self._counters.values())
        return iter(sorted(first.values(), key=lambda head: (counters[head.info.tenant], head.order)))


class _OldestModel(Adviser):
    """Slots go to models in the order in which they began to want one."""

    def order(self, starved: list[ModelRecord], now: Seconds) -> list[ModelRecord]:
        return sorted(starved, key=lambda model: (model.starved_since or 0.0, model.key))


class _EarliestDueModel(Adviser):
    def order(self, starved: list[ModelRecord], now: Seconds) -> list[ModelRecord]:
        return starved


def random_place(seed: int = _SEED) -> Place:
    """Any node that has a place now, drawn at random; if none has one, wait."""
    stream = Random(seed)

    def place(
        nodes: Iterable[NodeView], need: Need, now: Seconds, config: CoreConfig, may_stop: MayStop,
        claimed: Collection[InstanceId] = (),
    ) -> Placement | NoPlace:  # fmt: skip
        shuffled = sorted(nodes, key=lambda node: node.node_id)
        stream.shuffle(shuffled)
        found: Placement | NoPlace = placement.place(shuffled, need, now, config, may_stop, claimed)
        for node in shuffled:
            here = placement.place([node], need, now, config, may_stop, claimed)
            if isinstance(here, Placement):
                return here
        return found

    return place


def locality_place(
    nodes: Iterable[NodeView], need: Need, now: Seconds, config: CoreConfig, may_stop: MayStop,
    claimed: Collection[InstanceId] = (),
) -> Placement | NoPlace:  # fmt: skip
    """Only the nodes that have the bytes in DRAM, however long one must wait there; the disk only if none has."""
    everywhere = list(nodes)
    rows = [(node, node.residency.get(need.digest)) for node in everywhere]
    near = [node for node, row in rows if row is not None and row.dram_bytes >= need.num_bytes]
    return placement.place(near or everywhere, need, now, config, may_stop, claimed)


def _never(*_: Any) -> None:
    """Take the place that was found, at once."""
    return


def _single(**choices: Any) -> Callable[[], Choices]:
    """One idea; everything else first come, first served at any node."""
    base: dict[str, Any] = {"queue": _ByArrival, "adviser": _OldestModel, "worth_waiting": _never}
    return lambda: Choices(**{**base, "place": random_place(), **choices})


POLICIES: dict[str, Policy] = {
    "nearline": Policy(about="everything, as it runs live"),
    "fcfs": Policy(about="requests and models in order of arrival, any node", make_choices=_single()),
    "edf": Policy(
        about="requests and models by due date, any node",
        make_choices=_single(queue=_ByDueDate, adviser=_EarliestDueModel),
    ),
    "planner": Policy(
        about="requests by due date, models as the planner says, any node",
        make_choices=_single(queue=_ByDueDate, adviser=Adviser),
    ),
    "fair": Policy(about="virtual token counters over tenants, any node", make_choices=_single(queue=_Fair)),
    "shortest": Policy(about="shortest predicted first, any node", make_choices=_single(queue=_Shortest)),
    "start-up": Policy(
        about="the node where it starts soonest, at once; else by arrival", make_choices=_single(place=placement.place)
    ),
    "locality": Policy(about="only where its bytes are in DRAM; else by arrival",
                       make_choices=_single(place=locality_place)),
    "random": Policy(
        about="any node, drawn; orders as live",
        make_choices=lambda: Choices(place=random_place(), worth_waiting=_never),
    ),
    "locality-only": Policy(
        about="only where its bytes are in DRAM; orders as live",
        make_choices=lambda: Choices(place=locality_place, worth_waiting=_never),
    ),
    "impatient": Policy(
        about="as live, but never waits for a slot near the bytes", make_choices=lambda: Choices(worth_waiting=_never)
    ),
}  # fmt: skip
