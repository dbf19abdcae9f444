"""The numbers the controller's minds decide with. Frozen; the hands resolve files, flags and environment into it."""

from dataclasses import dataclass, field

from nearline.protocol import Bytes, Seconds, Slo, SloClass, TenantId

CLASS_TARGET_S: dict[SloClass, Seconds] = {
    SloClass.INTERACTIVE: 20.0,
    SloClass.BATCH_1M: 60.0,
    SloClass.BATCH_1H: 3600.0,
}
"""Time to first token that a class promises when the request names none. Source: [qlm] evaluation, classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Limits and time constants of ControllerCore. Durations in seconds."""

    epoch: str = "0"
    """Prefix of every id this core makes; unique per start of a controller, so that ids are never used twice."""
    dispatch_headroom: int = 2
    """Requests an instance may hold beyond `max_running`, so that a freed place is filled within a step. >= 0."""
    adapter_homes_s: Seconds = 10.0
    """How often it is chosen anew which instances of a model are home to which of its adapters. > 0."""
    max_prepared_adapters: int = 16
    """Adapters that one instance is asked to read ahead at a time; 0: none. >= 0."""
    min_prepared_traffic: float = 1.5
    """Requests of late, fading, below which an adapter is not read ahead of its next one: the second call within five
    minutes (the half-life) reaches it, a single one never. > 0."""
    max_held_per_model: int = 1024
    """Requests of one model that may wait undispatched; one more is refused with `overloaded`. >= 1."""
    max_held_total: int = 8192
    """The same over all models. >= 1."""
    start_timeout_s: Seconds = 600.0
    """Longest time a request waits for an instance before it is refused with `start_timeout`. > 0."""
    unplaceable_timeout_s: Seconds = 30.0
    """Longest time requests wait while no connected node could serve their model at all. >= 0."""
    max_wait_fraction: float = 0.5
    """Part of its class's target that a model without a slot waits before a busy instance is drained for it. > 0."""
    residence_factor: float = 4.0
    """An instance keeps its slot for this many times its own start (at most one wait bound): swaps stay rare. >= 0."""
    swap_drain_s: Seconds = 30.0
    """Longest time running sequences may go on once their instance gives up its slot; then they move. >= 0."""
    stop_drain_s: Seconds = 30.0
    """The same for instances stopped because they are idle or their model was removed. >= 0."""
    stop_timeout_s: Seconds = 15.0
    """Time past its drain after which an instance that still exists is told again to stop, at once. > 0."""
    stop_s: Seconds = 0.1
    """Estimate of the time in which an idle instance gives up its slot. >= 0."""
    node_grace_s: Seconds = 1.0
    """Time a node may be away before its instances count as lost. >= 0."""
    max_start_failures: int = 3
    """Failed starts in a row after which the waiting requests get the instance's error. >= 1."""
    start_backoff_s: Seconds = 0.5
    """Pause after a failed start; doubles with each further one. > 0."""
    start_backoff_max_s: Seconds = 30.0
    """Upper bound of that pause. > 0."""
    max_losses: int = 25
    """Times one request may lose its instance, for any cause, before it fails. >= 1."""
    max_fruitless_losses: int = 3
    """Crashes in a row that a request may see without one new token: then it is the cause, and fails alone. >= 2."""
    scale_out_factor: float = 1.0
    """A further replica starts when more requests wait than this times what the replicas run at once. > 0."""
    demand_load: float = 0.8
    """Part of its places that traffic should keep busy; above it a model with waiting requests gets a replica. > 0."""
    scale_in_load: float = 0.6
    """A replica is spare while the traffic keeps less than this part of the others' places busy. > 0."""
    scale_in_s: Seconds = 60.0
    """Time a replica must be spare before it goes. > 0."""
    min_sharing_gain: float = 1.1
    """Replicas share a device only if two there were not measured to serve less than this many times one. > 0."""
    refusal_quantile: float = 0.1
    """A deadline is out of reach when even this quantile of the estimated end is later. In (0, 1)."""
    max_wait_targets: float = 3.0
    """A request is told to come back when it would wait longer than this times its class's target. > 0."""
    solver_limit_s: Seconds = 0.0
    """Time in which a solver beside the core may look for a better plan; 0: none is asked. >= 0."""
    max_preemptions: int = 3
    """Times one answer may be interrupted by requests of stricter classes; 0: never. >= 0."""
    max_preempted_target_s: Seconds = 120.0
    """An interrupted answer goes on once it has waited `max_wait_fraction` of its target, or of this if less. > 0."""
    max_moves: int = 3
    """Times one request may move from one instance to another of its model; 0: never. >= 0."""
    move_gap_s: Seconds = 10.0
    """Least time between two moves of one request. > 0."""
    memory_check_s: Seconds = 1.0
    """How often it is estimated whether the memory of a model's instances suffices for what they were sent. > 0."""
    tenant_weights: tuple[tuple[TenantId, float], ...] = ()
    """Shares of tenants that wait for the same model; a tenant that is not listed weighs 1. Each > 0."""


def target_s(slo: Slo) -> Seconds:
    """Time to first token this request was promised, from its arrival."""
    return slo.ttft_s if slo.ttft_s is not None else CLASS_TARGET_S[slo.slo_class]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What the runtime needs beyond the core's numbers. `node_token` is a secret and never logged."""

    core: CoreConfig = CoreConfig()
    node_token: str = field(default="", repr=False)
    """Bearer token that node agents must show, and that they are shown; empty: none."""
    fencing_token: int = 0
    """Rises with every new leader; agents refuse a leader with a smaller one of the same deployment."""
    deployment: str = ""
    """What the state store is called, from its first use on: fencing tokens of different ones are not compared."""
    report_interval_s: Seconds = 1.0
    """How often node agents report. > 0."""
    link_patience_s: Seconds = 12.0
    """Silence after which a node's link counts as dead; agents speak every `report_interval_s`. A second in which
    either side is busy must not cost a link. > 0."""
    check_interval_s: Seconds = 5.0
    """How often the core's invariants are checked while it runs. > 0."""
    orphan_grace_s: Seconds = 120.0
    """Time a checkpoint on a connected node may be needed by nobody before it is deleted there. > 0."""
    journal_directory: str | None = None
    """Where the journal of events is kept; None: nowhere."""
    journal_part_bytes: Bytes = 16 << 20
    """Size at which a journal goes on in a new file. > 0."""
    journal_num_parts: int = 8
    """Files kept over all starts of the controller; older ones are deleted. >= 1."""
