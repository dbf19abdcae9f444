"""Passes sequences between the controller and engines, token by token, and answers for engines that cannot."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from nearline.node_agent.sequences import SequenceTable
from nearline.node_agent.types import EngineId
from nearline.protocol import (
    Digest,
    FinishReason,
    InstanceId,
    InstanceState,
    InstanceStatus,
    RequestId,
    SequenceUpdate,
)
from nearline.protocol.errors import ErrorInfo, InstanceFailed, NearlineError
from nearline.protocol.frames import (
    Abort,
    AdapterBytes,
    AdapterLoaded,
    LoadAdapter,
    PrepareAdapter,
    StepDone,
    Submit,
    Tokens,
    UnloadAdapter,
    Yield,
)

_UNBOUND = (InstanceState.PENDING, InstanceState.STARTING)
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Load:
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_used: int = 0


@dataclass(frozen=True, slots=True)
class RelayPorts:
    """Where the relay speaks to: an engine, the controller, the store's directories, who waits for a drain, and who
    lends adapters' bytes to engines."""

    to_engine: Callable[[EngineId, object], None]
    to_controller: Callable[[object], None]
    directory: Callable[[Digest], Path]
    drained: Callable[[InstanceId], None]
    lend: Callable[[EngineId, Digest], AdapterBytes | None]


class Relay:
    """Owns the table of running sequences and which adapters each engine was told to load."""

    def __init__(self, ports: RelayPorts) -> None:
        self._ports = ports
        self._table = SequenceTable()
        self._engines: dict[InstanceId, EngineId] = {}
        self._instances: dict[EngineId, InstanceId] = {}
        self._loads: dict[InstanceId, _Load] = {}
        self._adapters: dict[InstanceId, dict[Digest, bool | None]] = {}
        """What each engine was told to load; True: only ahead of its first request; None: it does not have it."""
        self._to_prepare: dict[InstanceId, dict[Digest, None]] = {}
        """What instances that are not bound yet shall load ahead."""
        self._draining: dict[InstanceId, None] = {}

    def bind(self, engine_id: EngineId, instance_id: InstanceId) -> None:
        """Remember which engine serves an instance."""
        self._engines[instance_id] = engine_id
        self._instances[engine_id] = instance_id
        self._adapters[instance_id] = {}

    def unbind(self, engine_id: EngineId) -> None:
        """Forget an engine's instance; what the engine still says about it is not passed on."""
        instance_id = self._instances.pop(engine_id, None)
        if instance_id is None:
            return
        for book in (self._engines, self._loads, self._adapters, self._draining):
            book.pop(instance_id, None)
        self._table.take(instance_id)

    def engine_of(self, instance_id: InstanceId) -> EngineId | None:
        return self._engines.get(instance_id)

    @property
    def is_busy(self) -> bool:
        """Whether any instance runs a sequence."""
        return bool(self._table.instances())

    def submit(self, message: Submit, is_ready: bool) -> None:
        """Hand a sequence to its engine, after its adapter; answer at once when that cannot be."""
        instance_id, request = message.instance_id, message.request
        engine_id = self._engines.get(instance_id)
        if engine_id is None or not is_ready:
            error: NearlineError = InstanceFailed(
                f"instance {instance_id} does not serve on this node now; dispatch again"
            )
            self._answer(instance_id, [(request.request_id, message.attempt)], ErrorInfo.of(error))
            return
        if request.adapter_digest:
            try:
                self._load_adapter(instance_id, request.adapter_digest)
            except NearlineError as missing:
                self._answer(instance_id, [(request.request_id, message.attempt)], ErrorInfo.of(missing))
                return
        if self._table.add(instance_id, request.request_id, message.attempt):
            self._ports.to_engine(engine_id, Abort(instance_id, request.request_id))
        self._ports.to_engine(engine_id, message)

    def prepare_adapter(self, message: PrepareAdapter, state: InstanceState | None) -> None:
        """Have an adapter read before its first Submit, by an instance in this state; before it is bound, then."""
        instance_id, digest = message.instance_id, message.digest
        if state in _UNBOUND:
            self._to_prepare.setdefault(instance_id, {})[digest] = None
        elif state in (InstanceState.LOADING, InstanceState.READY) and instance_id in self._engines:
            try:
                self._load_adapter(instance_id, digest, is_ahead=True)
            except NearlineError as missing:
                log.info("adapter not read ahead", instance_id=instance_id, digest=digest, reason=missing.message)
        else:
            log.info("adapter not read ahead", instance_id=instance_id, digest=digest, reason="no such instance")

    def bind_sent(self, instance_id: InstanceId) -> None:
        """Have read what was to be prepared while the instance was not bound."""
        for digest in self._to_prepare.pop(instance_id, {}):
            self.prepare_adapter(PrepareAdapter(instance_id, digest), InstanceState.LOADING)

    def ended(self, instance_id: InstanceId) -> None:
        """Forget what an instance was to prepare: it has ended, bound or not."""
        self._to_prepare.pop(instance_id, None)

    def abort(self, message: Abort) -> None:
        """End one sequence; nothing more is said about it."""
        if self._table.remove(message.instance_id, message.request_id):
            self._ports.to_engine(self._engines[message.instance_id], message)
            self._tell_drained(message.instance_id)

    def yield_place(self, message: Yield) -> None:
        """Let one sequence give way inside its engine; one that is not there any more has given way."""
        if self._table.has(message.instance_id, message.request_id):
            self._ports.to_engine(self._engines[message.instance_id], message)

    def step_done(self, engine_id: EngineId, step: StepDone) -> None:
        """Pass on what a step produced."""
        instance_id = self._instances.get(engine_id)
        if instance_id is None:
            return
        self._loads[instance_id] = _Load(step.num_running, step.num_waiting, step.kv_tokens_used)
        updates = self._table.passing(instance_id, step.updates)
        if updates:
            self._ports.to_controller(Tokens(instance_id, updates))
            self._tell_drained(instance_id)

    def await_drain(self, instance_id: InstanceId) -> None:
        """Say when the instance has no sequence left."""
        self._draining[instance_id] = None
        self._tell_drained(instance_id)

    def fail(self, instance_id: InstanceId, error: ErrorInfo) -> None:
        """End the instance's sequences with an error."""
        self._answer(instance_id, self._table.take(instance_id), error)

    def abort_all(self) -> None:
        """End every sequence silently: the link they came over is gone."""
        for instance_id in self._table.instances():
            for request_id, _ in self._table.take(instance_id):
                self._ports.to_engine(self._engines[instance_id], Abort(instance_id, request_id))
            self._tell_drained(instance_id)

    def adapter_loaded(self, engine_id: EngineId, message: AdapterLoaded) -> InstanceId | None:
        """Note the outcome of a load and name the instance; after a failure the next Submit tries again."""
        if message.error is not None:
            return self.adapter_gone(engine_id, message.digest)
        return self.instance_of(engine_id)

    def adapter_gone(self, engine_id: EngineId, digest: Digest) -> InstanceId | None:
        """Note that an engine has an adapter no more and name the instance; whoever wants it next says so again."""
        instance_id = self.instance_of(engine_id)
        if instance_id is not None and digest in self._adapters[instance_id]:
            self._adapters[instance_id][digest] = None
        return instance_id

    def instance_of(self, engine_id: EngineId) -> InstanceId | None:
        """Name the instance that is bound to a process, if one is."""
        return self._instances.get(engine_id)

    def unload_adapter(self, digest: Digest) -> list[InstanceId]:
        """Tell every engine that has an adapter to let go of it; name their instances."""
        for wishes in self._to_prepare.values():
            wishes.pop(digest, None)
        having = [instance_id for instance_id, digests in self._adapters.items() if digest in digests]
        for instance_id in having:
            del self._adapters[instance_id][digest]
            self._ports.to_engine(self._engines[instance_id], UnloadAdapter(digest))
        return having

    def with_load(self, status: InstanceStatus) -> InstanceStatus:
        """Add what the engine last said about its load."""
        load = self._loads.get(status.instance_id)
        if load is None:
            return status
        return replace(
            status,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_tokens_used=load.kv_tokens_used,
        )

    def _load_adapter(self, instance_id: InstanceId, digest: Digest, is_ahead: bool = False) -> None:
        """Tell an engine to load an adapter unless it was told before. Raises NearlineError if this node lacks it."""
        was_ahead = self._adapters[instance_id].get(digest)
        if was_ahead is False or (was_ahead and is_ahead):
            return
        directory = self._ports.directory(digest)
        self._adapters[instance_id][digest] = is_ahead
        engine_id, is_first = self._engines[instance_id], was_ahead is None and not is_ahead
        lent = self._ports.lend(engine_id, digest) if is_first else None  # else it asks, if and when it reads
        self._ports.to_engine(engine_id, LoadAdapter(digest, str(directory), is_ahead, is_pooled=True, lent=lent))

    def _answer(self, instance_id: InstanceId, sequences: list[tuple[RequestId, int]], error: ErrorInfo) -> None:
        updates = tuple(
            SequenceUpdate(request_id, n, (), FinishReason.ERROR, error=error) for request_id, n in sequences
        )
        if updates:
            self._ports.to_controller(Tokens(instance_id, updates))

    def _tell_drained(self, instance_id: InstanceId) -> None:
        if instance_id in self._draining and self._table.is_empty(instance_id):
            del self._draining[instance_id]
            self._ports.drained(instance_id)
