"""Where a model can start soonest, and what must leave for it. Pure.

For every device that can get at the bytes, in this order of preference for what has to go:
1. nothing: a slot and the memory are free;
2. instances that are draining already and that no more urgent model counts on;
3. instances the caller allows to be stopped: idle ones cheapest first, then busy ones.
The device with the least (start-up time + time to free the slot + damage to what is stopped) wins; ties by id.
Source: [serverlessllm] start-up-time-optimised placement; we add what stopping costs others, and memory.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import StartEstimate, displaced_s, startup
from nearline.controller.policy.views import InstanceView, NodeView
from nearline.protocol import Bytes, DeviceInfo, Digest, InstanceId, NodeId, Seconds

MayStop = Callable[[InstanceView], bool]


@dataclass(frozen=True, slots=True)
class Need:
    """A model version that wants one more instance. `avoid` lists nodes on which it failed to start, `crowded` devices
    on which it must not have another one."""

    digest: Digest
    num_bytes: Bytes
    adapter_digest: Digest | None = None
    avoid: Collection[NodeId] = ()
    crowded: Collection[tuple[NodeId, int]] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """Start on this device once everything in `leaving` is gone; `victims` of it must be told to stop first."""

    node_id: NodeId
    device_index: int
    estimate_s: Seconds
    leaving: tuple[InstanceId, ...]
    victims: tuple[InstanceId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NoPlace:
    """Nothing can be done now. `is_hopeless`: no connected node could run it even if it were empty."""

    reason: str
    is_hopeless: bool = False
    is_too_big: bool = False


def place(
    nodes: Iterable[NodeView],
    need: Need,
    now: Seconds,
    config: CoreConfig,
    may_stop: MayStop,
    claimed: Collection[InstanceId] = (),
) -> Placement | NoPlace:
    """Choose the device on which `need` can serve soonest; `claimed` draining instances make room for others."""
    connected = [node for node in nodes if node.is_connected]
    holders = [node for node in connected if node.holds(need.digest) and node.holds(need.adapter_digest)]
    fitting = [(n, d) for n in holders for d in n.report.devices if d.num_slots and _can_hold(n, d, need)]
    if not fitting:
        return _hopeless(connected, holders, need)
    fitting = [pair for pair in fitting if pair[0].node_id not in need.avoid] or fitting
    if need.crowded:
        fitting = [(n, d) for n, d in fitting if (n.node_id, d.index) not in need.crowded]
    best: tuple[Seconds, NodeId, int] | None = None
    placement: Placement | NoPlace = NoPlace("every slot is taken by instances that may not be stopped yet")
    starts = [(startup(n, need.digest, need.num_bytes, now), n, d) for n, d in fitting]
    for start, node, device in sorted(starts, key=lambda row: row[0].total_s):
        if best is not None and start.total_s > best[0]:
            break  # nothing makes a place cost less than its start
        leaving = _make_room(node, device, need, now, may_stop, claimed)
        if leaving is None:
            continue
        cost, found = _cost(node, device, need, leaving, start, now, config)
        rank = (cost, node.node_id, device.index)
        if best is None or rank < best:
            best, placement = rank, found
    return placement


def copy_target(nodes: Iterable[NodeView], need: Need, busy: Collection[NodeId]) -> NodeId | None:
    """Choose the node to which bytes should be copied so that `need` can start there at once: of those that have a
    slot, memory and disk free and nothing else coming (`busy`), the one with most disk; ties by id."""
    connected = [node for node in nodes if node.is_connected]
    ranked = []
    for node in connected:
        is_barred = node.holds(need.digest) or node.node_id in busy or node.node_id in need.avoid
        if is_barred or node.report.ssd_free_bytes < need.num_bytes:
            continue
        devices = [d for d in node.report.devices if d.num_slots and (node.node_id, d.index) not in need.crowded]
        if any(_can_hold(node, d, need) and _fits(node, d, need, []) for d in devices):
            ranked.append((-node.report.ssd_free_bytes, node.node_id))
    return min(ranked)[1] if ranked and any(_is_whole(node, need.digest) for node in connected) else None


def _is_whole(node: NodeView, digest: Digest) -> bool:
    """Whether a node can give a checkpoint to others."""
    row = node.residency.get(digest)
    return row is not None and row.ssd_bytes >= row.num_bytes


def damage_s(instance: InstanceView, now: Seconds) -> Seconds:
    """Cost of stopping an instance: the time to bring it back, weighted down the longer nobody called it."""
    back_s = startup(instance.node, instance.spec.digest, instance.model.num_bytes, now).total_s
    if instance.idle_since is None:
        return back_s * (1 + len(instance.in_flight))
    return back_s / (1.0 + now - instance.idle_since)


def _hopeless(connected: list[NodeView], holders: list[NodeView], need: Need) -> NoPlace:
    if not connected:
        return NoPlace("no node is connected", is_hopeless=True)
    if not holders:
        return NoPlace(f"none of {len(connected)} connected nodes holds checkpoint {need.digest}", is_hopeless=True)
    sizes = [_memory(node, device) for node in holders for device in node.report.devices if device.num_slots]
    text = f"the checkpoint has {need.num_bytes} bytes; the nodes that hold it have room for {max(sizes, default=0)}"
    return NoPlace(text, is_hopeless=True, is_too_big=True)


def _make_room(
    node: NodeView, device: DeviceInfo, need: Need, now: Seconds, may_stop: MayStop, claimed: Collection[InstanceId]
) -> list[InstanceView] | None:
    """List what has to leave the device, draining instances first; None if that is not enough."""
    here = node.on_device(device)
    draining = [i for i in here if i.is_stopping and i.instance_id not in claimed]
    draining.sort(key=lambda i: (bool(i.in_flight), i.stop_by, i.instance_id))
    stoppable = [i for i in here if not i.is_stopping and may_stop(i)]
    stoppable.sort(key=lambda i: (i.idle_since is None, damage_s(i, now), i.instance_id))
    leaving: list[InstanceView] = []
    for candidate in (None, *draining, *stoppable):
        if candidate is not None:
            leaving.append(candidate)
        if _fits(node, device, need, leaving):
            return _needed(node, device, need, leaving)
    return None


def _needed(node: NodeView, device: DeviceInfo, need: Need, leaving: list[InstanceView]) -> list[InstanceView]:
    """Drop from `leaving` what turned out not to help, dearest first."""
    for candidate in reversed(leaving):
        fewer = [instance for instance in leaving if instance is not candidate]
        if _fits(node, device, need, fewer):
            leaving = fewer
    return leaving


def _fits(node: NodeView, device: DeviceInfo, need: Need, leaving: list[InstanceView]) -> bool:
    gone = {instance.instance_id: None for instance in leaving}
    staying = [i for i in node.on_device(device) if i.instance_id not in gone]
    if len(staying) >= device.num_slots:
        return False
    if device.weight_bytes and need.num_bytes + sum(i.model.num_bytes for i in staying) > device.weight_bytes:
        return False
    pinned = {i.spec.digest: i.model.num_bytes for i in node.instances.values() if i.instance_id not in gone}
    pinned[need.digest] = need.num_bytes
    in_frames = [_in_frames(node, num_bytes) for num_bytes in pinned.values()]
    pool_bytes = node.report.dram_pool_bytes
    return sum(num_bytes for num_bytes in in_frames if num_bytes <= pool_bytes) <= pool_bytes  # others are streamed


def _can_hold(node: NodeView, device: DeviceInfo, need: Need) -> bool:
    if device.weight_bytes:
        return need.num_bytes <= device.weight_bytes
    return _in_frames(node, need.num_bytes) <= node.report.dram_pool_bytes


def _memory(node: NodeView, device: DeviceInfo) -> Bytes:
    """Bytes of weights a device can serve: from memory of its own, to which what the DRAM pool cannot hold is
    streamed past it, or from the pool."""
    return device.weight_bytes or node.report.dram_pool_bytes


def _in_frames(node: NodeView, num_bytes: Bytes) -> Bytes:
    """What a checkpoint takes of the pool, which gives whole frames."""
    frame_bytes = node.report.dram_frame_bytes
    return -(-num_bytes // frame_bytes) * frame_bytes


def _cost(
    node: NodeView,
    device: DeviceInfo,
    need: Need,
    leaving: list[InstanceView],
    start: StartEstimate,
    now: Seconds,
    config: CoreConfig,
) -> tuple[Seconds, Placement]:
    free_s, damage, victims = 0.0, displaced_s(node, need.digest, need.num_bytes), []
    for instance in leaving:
        remaining_s = max(0.0, instance.stop_by - now) if instance.is_stopping else config.swap_drain_s
        free_s = max(free_s, remaining_s if instance.in_flight else config.stop_s)
        if not instance.is_stopping:
            victims.append(instance.instance_id)
            damage += damage_s(instance, now)
    reason = f"starts from {start.tier} in {start.total_s:.2f} s"
    if leaving:
        reason += f" once {', '.join(i.instance_id for i in leaving)} left (about {free_s:.1f} s)"
    ids = tuple(instance.instance_id for instance in leaving)
    placement = Placement(node.node_id, device.index, start.total_s, ids, tuple(victims), reason)
    return start.total_s + free_s + damage, placement
