"""On which node a new checkpoint is brought in, and which nodes can give it to others. Pure."""

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


def peer_urls(nodes: Iterable[NodeView], digest: Digest, node_id: NodeId) -> tuple[str, ...]:
    """List the addresses of the other connected nodes that have all of a checkpoint on disk, those that hold most of
    it in DRAM first; ties by id."""
    ranked = []
    for node in nodes:
        row = node.residency.get(digest)
        if node.is_connected and node.node_id != node_id and row is not None and row.ssd_bytes >= row.num_bytes:
            ranked.append((-row.dram_bytes, node.node_id, node.report.http_url))
    return tuple(url for _, _, url in sorted(ranked))


def copy_place(nodes: Iterable[NodeView], digest: Digest) -> NodeId | None:
    """Choose the connected node with most disk left among those that do not have all of a checkpoint; ties by id."""
    ranked = []
    for node in nodes:
        row = node.residency.get(digest)
        if node.is_connected and (row is None or row.ssd_bytes < row.num_bytes):
            ranked.append((-node.report.ssd_free_bytes, node.node_id))
    return min(ranked)[1] if ranked else None
