"""The fleet as rows of JSON's types, for people and their tools. Pure: reads, changes nothing."""

from collections.abc import Mapping
from typing import Any

from nearline.controller.handle import InstanceTrack
from nearline.controller.policy.scaling import expires_at
from nearline.controller.policy.waiting import QUANTILES
from nearline.controller.promises import Tally
from nearline.controller.state import Fleet, InstanceRecord, ModelRecord, NodeRecord
from nearline.protocol import InstanceId, ModelId, Seconds, SloClass, TenantId, to_plain

Row = dict[str, Any]


def snapshot(fleet: Fleet, tracks: Mapping[InstanceId, InstanceTrack], now: Seconds) -> dict[str, list[Row]]:
    """Describe everything the controller knows. `tracks` holds what was seen of the instances' starts."""
    models = list(fleet.models.values())
    return {
        "nodes": [_node(node) for node in fleet.nodes.values()],
        "instances": [_instance(i, tracks.get(i.instance_id), now) for i in fleet.instances.values()],
        "models": [_model(model, now) for model in models],
        "queues": [row for model in models for row in _queues(model, now)],
        "promises": [_promise(*key, tally) for key, tally in fleet.promises.rows.items()],
    }


def _node(node: NodeRecord) -> Row:
    report = node.report
    return {
        "id": node.node_id,
        "is_connected": node.is_connected,
        "http_url": report.http_url,
        "devices": [device.name for device in report.devices],
        "num_slots": sum(device.num_slots for device in report.devices),
        "num_instances": len(node.instances),
        "num_prewarmed": report.num_prewarmed,
        "dram_pool_bytes": report.dram_pool_bytes,
        "dram_free_bytes": report.dram_free_bytes,
        "ssd_budget_bytes": report.ssd_budget_bytes,
        "ssd_free_bytes": report.ssd_free_bytes,
        "bandwidths": {row.tier.value: row.bytes_per_s for row in report.bandwidths},
        "profiles": {profile.digest: to_plain(profile) for profile in report.profiles},
        "residency": {row.digest: to_plain(row) for row in node.residency.values()},
    }


def _instance(instance: InstanceRecord, track: InstanceTrack | None, now: Seconds) -> Row:
    loaded_at, expiry, num_held = instance.loaded_at, expires_at(instance), len(instance.in_flight)
    timings = track.timings if track else None
    return {
        "id": instance.instance_id,
        "model": instance.spec.model_id,
        "digest": instance.spec.digest,
        "node": instance.node.node_id,
        "device_index": instance.spec.device_index,
        "state": "draining" if instance.is_stopping else instance.state.value,
        "num_running": min(num_held, instance.max_running),
        "num_waiting": max(0, num_held - instance.max_running),
        "max_running": instance.max_running,
        "kv_tokens_used": instance.kv_tokens_used,
        "kv_tokens_total": instance.kv_tokens_total,
        "num_adapters": len(instance.adapters),
        "idle_s": None if instance.idle_since is None else now - instance.idle_since,
        "expires_in_s": None if expiry is None else max(0.0, expiry - now),
        "start_s": None if loaded_at is None else loaded_at - instance.created_at,
        "estimate_s": instance.estimate_s,
        "timings": None if timings is None else to_plain(timings),
    }


def _model(model: ModelRecord, now: Seconds) -> Row:
    return {
        "id": model.spec.model_id,
        "digest": model.digest,
        "is_retired": model.is_retired,
        "num_replicas": model.num_live,
        "num_missing": _num_missing(model),
        "missing_because": (model.wait_reason or None) if _num_missing(model) else None,
        "num_running": model.num_running,
        "num_waiting": model.queue.num_waiting,
        "starved_s": None if model.starved_since is None else now - model.starved_since,
        "num_start_failures": model.num_start_failures,
        "prediction": _prediction(model),
    }


def _num_missing(model: ModelRecord) -> int:
    """Replicas that a model should have now and has not: of those it must have, and one if someone waits."""
    least = max(model.spec.min_replicas, 1 if model.queue.num_waiting else 0)
    return 0 if model.is_retired else max(0, least - model.num_live)


def _prediction(model: ModelRecord) -> Row:
    """How good the model's predictions of lengths (tokens) and of waits (part within the quantile) have been."""
    lengths, waits = model.lengths.calibration, model.waits
    return {
        "num_answers": lengths.num_answers,
        "mean_tokens": lengths.actual.mean,
        "mean_error_tokens": lengths.error.mean,
        "mean_absolute_error_tokens": lengths.size.mean,
        "num_waits": waits.num_observed,
        "wait_coverage": {f"p{q * 100:.0f}": waits.coverage(q) for q in QUANTILES},
    }


def _promise(model_id: ModelId, slo_class: SloClass, tenant: TenantId, tally: Tally) -> Row:
    return {
        "model": model_id,
        "slo_class": slo_class.value,
        "tenant": tenant,
        "met": tally.num_met,
        "missed": tally.num_missed,
        "refused": tally.num_refused,
        "attainment": tally.attainment,
    }


def _why(is_late: bool) -> str:
    return "late: others can still be in time" if is_late else "all places of its instances are taken"


def _queues(model: ModelRecord, now: Seconds) -> list[Row]:
    """One row per request group with waiting requests, the most urgent first."""
    return [
        {
            "model": model.spec.model_id,
            "digest": model.digest,
            "adapter_digest": group.key.adapter_digest,
            "slo_class": group.key.slo_class.value,
            "length_bucket": group.key.length_bucket,
            "num_tenants": len(group.lines),
            "num_waiting": len(group.waiting),
            "oldest_s": now - group.head().arrived_at,
            "due_in_s": group.head().due_at - now,
            "is_late": group.key.is_late,
            "reason": model.wait_reason or _why(group.key.is_late),
        }
        for group in model.queue.ordered_groups()
    ]
