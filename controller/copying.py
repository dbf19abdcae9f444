"""Bytes that must come to another node before a replica can run there. Pure.

Nodes fetch from each other only when told to. They are told while the nodes that hold a model's bytes have no place for
one more replica: for a model that runs fewer than it must, and for one that runs none while requests wait beyond their
bound, or for slots that minimums of other models keep. Any other queue is over before a copy is.
"""

from dataclasses import dataclass

from nearline.controller.actions import CopyCheckpoint
from nearline.controller.agenda import Agenda
from nearline.controller.config import CoreConfig
from nearline.controller.events import CopyFailed
from nearline.controller.policy.placement import Need, NoPlace, copy_target
from nearline.controller.policy.scaling import backoff_s
from nearline.controller.state import Fleet, ModelRecord
from nearline.protocol import Digest, NodeId, Seconds


@dataclass(slots=True)
class _Failure:
    """Copies of a checkpoint that failed in a row."""

    num: int
    retry_at: Seconds
    reason: str


class CopyDesk:
    """Owns: the copies under way, at most one to a node and one of a checkpoint at a time, and which have failed."""

    def __init__(self, fleet: Fleet, config: CoreConfig, agenda: Agenda) -> None:
        self._fleet = fleet
        self._config = config
        self._agenda = agenda
        self._under_way: dict[Digest, NodeId] = {}
        self._failures: dict[Digest, _Failure] = {}
        self._arrived: dict[Digest, NodeId] = {}

    def bring(self, model: ModelRecord, need: Need, found: NoPlace, now: Seconds) -> str:
        """Have the bytes copied to a node that has a place for a replica. Returns what the replica waits for."""
        if model.digest in self._under_way:
            return f"its bytes are being copied to {self._under_way[model.digest]}"
        failure = self._failures.get(model.digest)
        if failure is not None and failure.retry_at > now:
            return f"{failure.reason}; the next try is in {failure.retry_at - now:.0f} s"
        node_id = copy_target(self._fleet.nodes.values(), need, self._under_way.values())
        if node_id is None:
            return f"{found.reason}; no other node has a free slot, memory and disk for its bytes"
        self._under_way[model.digest] = node_id
        num_least = max(1, model.spec.min_replicas)
        reason = f"{model.spec.model_id} runs {model.num_live} of at least {num_least} replicas: {found.reason}"
        self._agenda.do(CopyCheckpoint(model.spec.checkpoint, node_id, reason))
        return f"its bytes are being copied to {node_id}"

    def is_coming(self, digest: Digest, now: Seconds) -> bool:
        """Whether bytes are on their way, or will be tried again after a pause."""
        failure = self._failures.get(digest)
        return digest in self._under_way or (failure is not None and failure.retry_at > now)

    def arrived(self, node_id: NodeId, digest: Digest) -> None:
        """Take note of an import that ended on a node, be it a copy or not."""
        if self._under_way.get(digest) == node_id:
            del self._under_way[digest]
            self._arrived[digest] = node_id

    def started(self, node_id: NodeId, digest: Digest) -> None:
        """Forget what failed once a replica has its bytes where they were copied to: only then were they the right
        ones."""
        if self._arrived.get(digest) == node_id:
            del self._arrived[digest]
            self._failures.pop(digest, None)

    def failed(self, event: CopyFailed, now: Seconds) -> None:
        """Back off, then look for a node again. What arrived may fail, too: it turns out to be something else."""
        if self._under_way.get(event.digest) == event.node_id:
            del self._under_way[event.digest]
        self._arrived.pop(event.digest, None)
        before = self._failures.get(event.digest)
        num = 1 if before is None else before.num + 1
        reason = f"copying its bytes to {event.node_id} failed: {event.error.message}"
        retry_at = now + backoff_s(num, self._config)
        self._failures[event.digest] = _Failure(num, retry_at, reason)
        self._agenda.timers.set(("plan", f"copy {event.digest}"), retry_at)
        self._agenda.is_plan_due = True
