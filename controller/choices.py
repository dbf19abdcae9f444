"""Which policies one core decides with. Live ones are the defaults; comparisons exchange single ones. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from nearline.controller.advice import Adviser
from nearline.controller.config import CoreConfig
from nearline.controller.policy import patience, placement
from nearline.controller.policy.placement import MayStop, Need, NoPlace, Placement
from nearline.controller.policy.views import InstanceView, NodeView
from nearline.controller.queues import VirtualQueue
from nearline.controller.state import Fleet
from nearline.protocol import InstanceId, Seconds, TenantId

Place = Callable[[Iterable[NodeView], Need, Seconds, CoreConfig, MayStop, Collection[InstanceId]], Placement | NoPlace]
WorthWaiting = Callable[
    [Iterable[NodeView], Need, Placement, Callable[[InstanceView], Seconds], Seconds], patience.Soon | None
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """`queue` orders the requests of a model, `adviser` the models that want a slot, `place` finds the slot, and
    `worth_waiting` says whether a later one is better."""

    queue: Callable[[Mapping[TenantId, float]], VirtualQueue] = VirtualQueue
    adviser: Callable[[Fleet, CoreConfig], Adviser] = Adviser
    place: Place = placement.place
    worth_waiting: WorthWaiting = patience.worth_waiting


LIVE = Choices()
