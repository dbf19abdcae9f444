"""On which node a new checkpoint is brought in. Pure."""

from collections.abc import Iterable

from nearline.controller.policy.views import NodeView
from nearline.protocol import Digest, NodeId


def import_place(nodes: Iterable[NodeView], base_digest: Digest | None) -> NodeId | None:
    """Choose the connected node with most disk left, for an adapter among those that hold its base; ties by id.

    None: no node is connected.
    """
    connected = [node for node in nodes if node.is_connected]
    holders = [node for node in connected if base_digest is not None and node.holds(base_digest)]
    ranked = [(-node.report.ssd_free_bytes, node.node_id) for node in holders or connected]
    return min(ranked)[1] if ranked else None
