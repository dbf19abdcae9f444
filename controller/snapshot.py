"""The fleet in JSON's types, for people and their tools. Pure: reads, changes nothing."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nearline.controller.state import Fleet, InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import Seconds, to_plain


def snapshot(fleet: Fleet, tracks: Mapping[Any, Any], counters: Any, now: Seconds) -> dict[str, Any]:
    """Describe everything the controller knows. `tracks` maps instance ids to what was seen of their starts."""
    return {
        "nodes": [_node(node) for node in fleet.nodes.values()],
        "instances": [_instance(i, tracks.get(i.instance_id), now) for i in fleet.instances.values()],
        "models": [_model(model, now) for model in fleet.models.values()],
        "adapters": [to_plain(adapter) for adapter in fleet.adapters.values()],
        "num_waiting": fleet.num_waiting,
        "num_running": len(fleet.requests) - fleet.num_waiting,
        "counters": asdict(counters),
    }


def _node(node: NodeRecord) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(node.report)
    plain["is_connected"] = node.is_connected
    plain["instances"] = [instance.instance_id for instance in node.instances.values()]
    plain["residency"] = [to_plain(row) for row in node.residency.values()]
    return plain


def _instance(instance: InstanceRecord, track: Any, now: Seconds) -> dict[str, Any]:
    ready_at, timings = instance.ready_at, track.timings if track else None
    return {
        "instance_id": instance.instance_id,
        "model_id": instance.spec.model_id,
        "digest": instance.spec.digest,
        "node_id": instance.node.node_id,
        "device_index": instance.spec.device_index,
        "state": "draining" if instance.is_stopping else instance.state.value,
        "num_running": len(instance.in_flight),
        "max_running": instance.max_running,
        "idle_s": None if instance.idle_since is None else now - instance.idle_since,
        "start_s": None if ready_at is None else ready_at - instance.created_at,
        "estimate_s": instance.estimate_s,
        "adapter_digests": list(instance.adapters),
        "timings": None if timings is None else to_plain(timings),
    }


def _model(model: ModelRecord, now: Seconds) -> dict[str, Any]:
    groups = model.queue.ordered_groups()
    plain: dict[str, Any] = to_plain(model.spec)
    return plain | {
        "is_retired": model.is_retired,
        "num_waiting": model.queue.num_waiting,
        "num_running": model.num_running,
        "num_replicas": model.num_live,
        "starved_s": None if model.starved_since is None else now - model.starved_since,
        "wait_reason": model.wait_reason if model.queue.num_waiting else "",
        "groups": [
            {
                "adapter_digest": group.key.adapter_digest,
                "slo_class": group.key.slo_class.value,
                "num_waiting": len(group.waiting),
                "oldest_s": now - group.head().arrived_at,
            }
            for group in groups
        ],
    }
