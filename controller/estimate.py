"""How long things will take: starting a model on a node, and the wait worth naming in Retry-After. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from nearline.controller.policy.views import ModelView, NodeView, RunningView
from nearline.protocol import Bytes, Digest, InstanceState, Seconds, Tier

FALLBACK_BYTES_PER_S = 500e6
"""Assumed rate of a tier that a node reports bytes in but no bandwidth for: an ordinary SATA SSD."""
_WITH_PROCESS = (InstanceState.LOADING, InstanceState.READY, InstanceState.DRAINING)
_RESUMES_KEPT = 256.0
_LEAST_RESUMES = 8.0


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """Parts of one start-up time. `tier` is the farthest one that bytes must come from."""

    queue_s: Seconds
    read_s: Seconds
    bind_s: Seconds
    process_s: Seconds
    tier: Tier

    @property
    def total_s(self) -> Seconds:
        return self.queue_s + self.read_s + self.bind_s + self.process_s


@dataclass(slots=True)
class ResumeCost:
    """What it takes one model to compute known tokens and come to the next: a·tokens + b, fitted to what first tokens
    took in loaded instances when a place was free. Old ones fade.

    Source: [serverlessllm] resume time of a migration by tokens; it fits a and b offline, this one learns them.
    """

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def note(self, num_tokens: float, seconds: Seconds) -> None:
        """Learn from one first token, or from one resumed attempt's next."""
        self._weight = weight = min(self._weight + 1.0, _RESUMES_KEPT)
        step, tokens, rest = 1.0 / weight, num_tokens - self._tokens, seconds - self._seconds
        self._tokens += step * tokens
        self._seconds += step * rest
        self._variance = (1.0 - step) * (self._variance + step * tokens * tokens)
        self._covariance = (1.0 - step) * (self._covariance + step * tokens * rest)

    @property
    def is_known(self) -> bool:
        return self._weight >= _LEAST_RESUMES

    def seconds(self, num_tokens: float) -> Seconds:
        """Estimate the time to the next token of a request that has `num_tokens`, prompt and answer together."""
        slope = max(0.0, self._covariance / self._variance) if self._variance > 0.0 else 0.0
        base = self._seconds - slope * self._tokens
        if base < 0.0:  # a line through the origin then
            slope, base = self._seconds / max(1.0, self._tokens), 0.0
        return base + slope * num_tokens


def generated_tokens(request: RunningView, token_s: Seconds, now: Seconds) -> float:
    """Estimate how many tokens a request has: what it brought, and the time it ran here over the time of a token.

    Source: [serverlessllm] tokens of a running request, as its router estimates them.
    """
    if not request.has_token:
        return request.num_kept
    until = now if request.preempted_at is None else request.preempted_at
    here = max(1.0, (until - request.dispatched_at) / token_s) if token_s > 0.0 else 1.0
    return min(request.num_kept + here, float(request.info.max_tokens))


def startup(node: NodeView, digest: Digest, num_bytes: Bytes, now: Seconds) -> StartEstimate:
    """Estimate the start of a checkpoint on a node, as if a slot were free.

    Reads on one node are serialised, so a read waits for those before it; bytes in DRAM wait for nobody.
    Source: [serverlessllm] start-up time estimation: queue + bytes / bandwidth; we sum over tiers and add bind time.
    """
    dram, ssd, remote = bytes_by_tier(node, digest, num_bytes)
    dram_rate = node.bandwidth(Tier.DRAM) if dram else 0.0
    read_s = dram / dram_rate if dram_rate > 0 else 0.0
    read_s += ssd / _rate(node, Tier.SSD) if ssd else 0.0
    read_s += remote / _rate(node, Tier.REMOTE) if remote else 0.0
    is_far = ssd + remote > 0
    queue_s = max(0.0, node.storage_free_at - now) if is_far else 0.0
    process_s = 0.0 if _has_process(node) else node.report.process_s
    tier = Tier.REMOTE if remote else Tier.SSD if ssd else Tier.DRAM
    return StartEstimate(queue_s, read_s, node.report.bind_s, process_s, tier)


def _has_process(node: NodeView) -> bool:
    """Whether a start finds a warm process. A stop gives its own back, so between two reports their number stays the
    same, whoever has them; and where every slot is taken, who leaves one leaves a process with it.
    """
    report, num_taken = node.report, len(node.instances)
    if report.num_prewarmed > num_taken:
        return True
    num_warm = report.num_prewarmed + sum(status.state in _WITH_PROCESS for status in report.instances)
    return num_warm > min(num_taken, sum(device.num_slots for device in report.devices) - 1)


def bytes_by_tier(node: NodeView, digest: Digest, num_bytes: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Split a checkpoint into the bytes a start would take from DRAM, from SSD and from elsewhere."""
    row = node.residency.get(digest)
    dram = min(num_bytes, row.dram_bytes) if row else 0
    stored = min(num_bytes, max(dram, row.ssd_bytes)) if row else 0
    return dram, stored - dram, num_bytes - stored


def displaced_s(node: NodeView, digest: Digest, num_bytes: Bytes) -> Seconds:
    """Estimate what a start costs others: the time to read again what it pushes out of a DRAM that is full.

    What the whole pool cannot hold is streamed past it and pushes nothing out.
    """
    if num_bytes > node.report.dram_pool_bytes:
        return 0.0
    _, ssd, remote = bytes_by_tier(node, digest, num_bytes)
    return max(0, ssd + remote - node.report.dram_free_bytes) / _rate(node, Tier.SSD)


def taken_s(node: NodeView, digest: Digest, num_bytes: Bytes) -> Seconds:
    """Estimate what a start takes from others: the time to read again what it pushes out now, and where a node has more
    checkpoints than its DRAM can hold, all it reads: room that stands free is room that a later read will lack.
    """
    pool_bytes = node.report.dram_pool_bytes
    if num_bytes > pool_bytes:
        return 0.0
    if sum(row.num_bytes for row in node.residency.values()) <= pool_bytes:
        return displaced_s(node, digest, num_bytes)
    _, ssd, remote = bytes_by_tier(node, digest, num_bytes)
    return (ssd + remote) / _rate(node, Tier.SSD)


def start_s(model: ModelView, nodes: Iterable[NodeView], now: Seconds) -> Seconds:
    """Estimate how soon a model without a usable instance may have one: at best, if a slot is free for it."""
    coming = [i.created_at + i.estimate_s - now for i in model.instances.values() if i.is_live and not i.is_usable]
    if not coming:
        holders = [node for node in nodes if node.is_connected and node.holds(model.digest)]
        coming = [startup(node, model.digest, model.num_bytes, now).total_s for node in holders]
    return max(0.0, min(coming, default=0.0))


def retry_after_s(model: ModelView) -> Seconds:
    """Estimate when a refused caller should come back: the queue's length over the pace it is served at.

    Units: whole seconds, from 1 to 60.
    """
    places = sum(i.max_running for i in model.instances.values() if i.is_usable)
    wait_s = model.queue.num_waiting * model.service_s / max(1, places)
    return float(min(60, max(1, round(wait_s))))


def _rate(node: NodeView, tier: Tier) -> float:
    return node.bandwidth(tier) or FALLBACK_BYTES_PER_S
