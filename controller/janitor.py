"""Which checkpoints lie on nodes for nobody: left by imports that came to nothing, or by deletions a node missed. Pure.

Bytes may be the last copy there is, so what is not certainly abandoned stays: only checkpoints that this very registry
once had brought in are swept (a controller pointed at the wrong Redis touches nothing), none before the whole registry
is known, none while something is being registered, and none before nobody has needed it for the whole grace period.
"""

from collections.abc import Container

from nearline.controller.state import Fleet
from nearline.protocol import Digest, NodeId, Seconds


class Janitor:
    """Keeps since when each checkpoint of each connected node has been needed by nobody."""

    def __init__(self, grace_s: Seconds) -> None:
        self.own: Container[Digest] = ()
        """Checkpoints that the registry had imported, ever; empty until the registry is known."""
        self.num_registering = 0
        self._grace_s = grace_s
        self._unneeded_since: dict[tuple[NodeId, Digest], Seconds] = {}

    def sweep(self, fleet: Fleet, now: Seconds) -> list[tuple[NodeId, Digest]]:
        """List what may be deleted now. What is still there after another grace period is listed again."""
        if self.num_registering:
            self._unneeded_since = {}
            return []
        needed = _needed(fleet)
        places = [
            (node.node_id, digest)
            for node in fleet.nodes.values()
            if node.is_connected
            for digest in node.residency
            if digest in self.own and digest not in needed
        ]
        self._unneeded_since = {place: self._unneeded_since.get(place, now) for place in places}
        due = [place for place, since in self._unneeded_since.items() if now - since >= self._grace_s]
        self._unneeded_since.update(dict.fromkeys(due, now))
        return due


def _needed(fleet: Fleet) -> dict[Digest, None]:
    """What a name, a version still draining, an instance or a request under way needs."""
    digests = [model.spec.checkpoint.digest for model in fleet.models.values()]
    digests += [adapter.checkpoint.digest for adapter in fleet.adapters.values()]
    digests += [instance.spec.digest for instance in fleet.instances.values()]
    adapters = [request.info.adapter_digest for request in fleet.requests.values()]
    return dict.fromkeys([*digests, *(digest for digest in adapters if digest is not None)])
