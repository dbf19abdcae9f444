"""The core, live: the one owner of ControllerCore, its clock, its journal, its links, and the callers' handles.

Everything that changes the fleet goes through `_post`, on the event loop, one event to its end before the next: there
are no locks because there is one writer. Actions never wait; what they lead to comes back as an event.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import structlog
from aiohttp import web

from nearline.controller import actions as do
from nearline.controller import events as happened
from nearline.controller.config import RuntimeConfig
from nearline.controller.core import ControllerCore
from nearline.controller.counters import Counters
from nearline.controller.handle import InstanceTrack, RequestHandle
from nearline.controller.imports import FileFetcher, Imports
from nearline.controller.janitor import Janitor
from nearline.controller.journal_keeper import JournalKeeper
from nearline.controller.mishaps import outcome
from nearline.controller.node_link import NodeLinks
from nearline.controller.plan_solver import PlanSolver
from nearline.controller.policy.imports import peer_urls
from nearline.controller.request_info import describe
from nearline.controller.snapshot import snapshot
from nearline.protocol import (
    AdapterSpec,
    Bytes,
    CheckpointInfo,
    CheckpointKind,
    Digest,
    InstanceId,
    InstanceState,
    InstanceStatus,
    ModelId,
    ModelSpec,
    NodeId,
    NodeReport,
    Request,
    RequestId,
    Seconds,
    SequenceUpdate,
    StartTimings,
)
from nearline.protocol.errors import InvalidRequest, NearlineError, StateUnavailable
from nearline.protocol.frames import (
    Abort,
    DeleteCheckpoint,
    EnsureInstance,
    ImportFinished,
    InstanceChanged,
    Preload,
    PrepareAdapter,
    ProfileFinished,
    ProfileProgress,
    Report,
    StopInstance,
    Submit,
    TaskFinished,
    TaskProgress,
    ToController,
    Tokens,
    Yield,
)

CLOCK: Callable[[], Seconds] = time.monotonic
StartObserver = Callable[[ModelId, StartTimings], None]
log = structlog.get_logger(__name__)


class Runtime:
    """The fleet as the front door sees it. Owns: the core, all links and handles, the journal. Use `async with`.

    `on_started` hears of every start once its timings are complete. `counters` and `core.fleet` may be read.
    """

    def __init__(self, config: RuntimeConfig, on_started: StartObserver | None = None) -> None:
        self.core = ControllerCore(config.core)
        self.counters = Counters()
        self._config = config
        self._on_started = on_started
        self._links = NodeLinks(config, self)
        self._imports = Imports(self.core.fleet, self._links, self.next_id)
        self._janitor = Janitor(config.orphan_grace_s)
        self._handles: dict[RequestId, RequestHandle] = {}
        self._tracks: dict[InstanceId, InstanceTrack] = {}
        self._events: deque[happened.Event] = deque()
        self._is_posting = False
        self._num_ids = 0
        self._wake: asyncio.TimerHandle | None = None
        self._journal = JournalKeeper(config)
        self._files: FileFetcher | None = None
        self._checks: asyncio.Task[None] | None = None
        self._solver = PlanSolver(self._post)

    async def __aenter__(self) -> Self:
        self._files = FileFetcher(self.core.fleet, self._config.node_token)
        self._checks = asyncio.create_task(self._check_regularly(), name="core checks")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let go of everything. Nodes keep their instances; open requests end with `state_unavailable`."""
        for handle in list(self._handles.values()):
            handle.end(StateUnavailable("the controller is stopping; try again", retry_after_s=1.0))
        self._handles.clear()
        self._links.close()
        await asyncio.gather(self._solver.close(), self._imports.close())
        if self._wake is not None:
            self._wake.cancel()
        if self._checks is not None:
            self._checks.cancel()
            await asyncio.gather(self._checks, return_exceptions=True)
        if self._files is not None:
            await self._files.close()
        self._journal.close()

    # ---- the front door ----

    def next_id(self, prefix: str) -> str:
        """Make an id that no earlier start of the controller has used."""
        self._num_ids += 1
        return f"{prefix}-{self._config.core.epoch}-{self._num_ids}"

    def open(self, request: Request) -> RequestHandle:
        """Start a request. Raises the NearlineError with which it is rejected at once."""
        if request.request_id in self._handles:
            raise InvalidRequest(f"request id {request.request_id!r} is already in use", param="request_id")
        handle = RequestHandle(request, CLOCK(), self._cancel)
        self._handles[request.request_id] = handle
        self._post(happened.RequestArrived(describe(request)))
        if handle.error is not None:
            raise handle.error
        return handle

    def add_model(self, spec: ModelSpec) -> None:
        """Register a model, or a new version or setting of it."""
        self._post(happened.ModelAdded(spec))

    def remove_model(self, model_id: ModelId) -> None:
        """Drain a model, then delete its checkpoint unless another name uses it."""
        self._post(happened.ModelRemoved(model_id))

    def add_adapter(self, spec: AdapterSpec) -> None:
        self._post(happened.AdapterAdded(spec))

    def remove_adapter(self, adapter_id: ModelId) -> None:
        self._post(happened.AdapterRemoved(adapter_id))

    def registry_loaded(self, own: Container[Digest]) -> None:
        """Say that every name there is was added: from now on, those of the registry's `own` checkpoints that none of
        them needs may go from the nodes. `own` may grow."""
        self._janitor.own = own

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Keep all bytes from an import to the name it is for: what the import found may be what a removal frees."""
        self._janitor.num_registering += 1
        try:
            yield
        finally:
            self._janitor.num_registering -= 1

    def import_checkpoint(
        self, kind: CheckpointKind, source: str, base_digest: Digest | None = None
    ) -> AsyncGenerator[TaskProgress | ImportFinished, None]:
        """Bring a checkpoint into a node's store; the last item is ImportFinished. Closing it early cancels.

        Raises the NearlineError with which the import failed.
        """
        return self._imports.run(kind, source, base_digest)

    def verify_checkpoint(self, digest: Digest) -> AsyncGenerator[tuple[NodeId, TaskProgress | TaskFinished], None]:
        """Check a checkpoint's bytes on every node that has it. Raises CheckpointCorrupt, NodeLost."""
        return self._imports.verify(digest)

    def copy_checkpoint(
        self, checkpoint: CheckpointInfo, node_id: NodeId | None
    ) -> AsyncGenerator[tuple[NodeId, TaskProgress | ImportFinished], None]:
        """Copy a checkpoint to another node from those that have it. Raises NodeLost, NotFound."""
        return self._imports.copy(checkpoint, node_id)

    def profile_checkpoint(
        self, digest: Digest, start: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[tuple[NodeId, ProfileProgress | ProfileFinished], None]:
        """Measure steps on an instance, after `start` if none is ready. Raises Overloaded, InstanceFailed, NodeLost."""
        return self._imports.profile(digest, start, self._post)

    async def evict_checkpoint(self, digest: Digest) -> Bytes:
        """Give a checkpoint's DRAM back wherever it is not pinned; return the bytes freed. Raises NodeLost."""
        return await self._imports.evict(digest)

    async def fetch_file(self, digest: Digest, name: str) -> bytes:
        """Return a small file that lies beside a checkpoint's weights. Raises NotFound or NodeLost."""
        if self._files is None:
            raise StateUnavailable("the controller is not started")
        return await self._files.fetch(digest, name)

    def snapshot(self) -> dict[str, list[dict[str, Any]]]:
        """Describe the fleet as rows of JSON's types: `nodes`, `instances`, `models`, `queues` and more."""
        rows = snapshot(self.core.fleet, self._tracks, CLOCK())
        return {**rows, "decisions": [self.core.decisions()]}

    async def serve_node(self, request: web.Request) -> web.WebSocketResponse:
        """Handle GET /internal/node."""
        return await self._links.serve(request)

    # ---- the links (node_link.LinkOwner) ----

    def node_joined(self, report: NodeReport) -> None:
        self._imports.node_lost(report.node_id)  # what it was asked over an earlier link, nobody will answer
        self._track_all(report)
        self._post(happened.NodeJoined(report))

    def node_lost(self, node_id: NodeId) -> None:
        self._imports.node_lost(node_id)
        self._post(happened.NodeLost(node_id))

    def frame_received(self, node_id: NodeId, frame: ToController) -> None:
        match frame:
            case Tokens(instance_id, updates):
                for update in updates:
                    self._sequence_updated(instance_id, update)
            case InstanceChanged(status):
                self._track(node_id, status)
                self._post(happened.InstanceChanged(node_id, status))
            case Report(report):
                self._track_all(report)
                self._post(happened.NodeReported(report))
            case _:
                self._imports.received(node_id, frame)
                if isinstance(frame, ImportFinished):
                    self._post(happened.CheckpointImported(node_id, frame.checkpoint))

    def _sequence_updated(self, instance_id: InstanceId, update: SequenceUpdate) -> None:
        handle = self._handles.get(update.request_id)
        is_stale = handle is None or handle.attempt != update.attempt
        if handle is None or is_stale or handle.track is None or handle.track.instance_id != instance_id:
            return
        if handle.receive(update, CLOCK()):
            self._post(happened.FirstToken(update.request_id, update.attempt))
        if handle.is_ended:
            self._handles.pop(update.request_id, None)
        if update.finish_reason is not None:
            ended = (update.request_id, update.attempt, update.finish_reason, len(handle.generated_token_ids))
            self._post(happened.SequenceEnded(*ended, error=update.error))

    def _track_all(self, report: NodeReport) -> None:
        for status in report.instances:
            self._track(report.node_id, status)

    def _track(self, node_id: NodeId, status: InstanceStatus) -> None:
        """Keep what the waterfall needs of an instance, and compare its start with the estimate."""
        track = self._tracks.get(status.instance_id)
        if status.state in (InstanceState.STOPPED, InstanceState.FAILED):
            self._tracks.pop(status.instance_id, None)
            if status.error is not None:
                log.warning("instance failed", instance=status.instance_id, code=status.error.code)
            return
        now = CLOCK()
        if track is None:
            track = self._tracks[status.instance_id] = InstanceTrack(status.instance_id, node_id, now, 0.0)
        if status.timings is not None and track.loaded_at is None:
            track.loaded_at, track.timings = now, status.timings
            took_s = now - track.ensured_at
            self.counters.start_estimate_s += track.estimate_s
            self.counters.start_error_s += abs(took_s - track.estimate_s)
            log.info("instance loaded", instance=track.instance_id, took_s=took_s, estimate_s=track.estimate_s)
            if self._on_started is not None:
                self._on_started(status.model_id, status.timings)

    def _post(self, event: happened.Event) -> None:
        """Take an event through the core. Events that come out of its actions wait until it is done."""
        self._events.append(event)
        if self._is_posting:
            return
        self._is_posting = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._is_posting = False

    def _step(self, event: happened.Event) -> None:
        now = CLOCK()
        self.counters.num_events += 1
        self._journal.record(event, now)
        try:
            todo = self.core.on(event, now)
        except Exception:
            self.counters.num_core_errors += 1
            log.exception("the core failed on an event; it is dropped", event_type=type(event).__name__)
            if isinstance(event, happened.RequestArrived):
                self._end(event.info.request_id, NearlineError("the controller failed on this request"))
            return
        for action in todo:
            try:
                self._execute(action, now)
            except Exception:
                self._failed(action)

    def _failed(self, action: do.Action) -> None:
        self.counters.num_action_errors += 1
        log.exception("an action failed; what it was for ends", action_type=type(action).__name__)
        if (event := outcome(action)) is not None:
            self._post(event)

    def _execute(self, action: do.Action, now: Seconds) -> None:
        match action:
            case do.Dispatch():
                self._dispatch(action, now)
            case do.AbortSequence(request_id, instance_id, node_id):
                self._links.send(node_id, Abort(instance_id, request_id))
            case do.YieldPlace(request_id, instance_id, node_id, reason):
                self.counters.num_preemptions += 1
                log.info("sequence gives way", request=request_id, instance=instance_id, reason=reason)
                self._links.send(node_id, Yield(instance_id, request_id))
            case do.Reject(request_id, error, reason):
                self.counters.num_rejects += 1
                log.info("request rejected", request=request_id, code=error.code, reason=reason)
                self._end(request_id, error.exception())
            case do.EnsureInstance(spec, node_id, estimate_s, reason):
                self.counters.num_starts += 1
                log.info("instance start", instance=spec.instance_id, node=node_id, reason=reason)
                self._tracks.setdefault(spec.instance_id, InstanceTrack(spec.instance_id, node_id, now, estimate_s))
                peers = peer_urls(self.core.fleet.nodes.values(), spec.digest, node_id)
                self._links.send(node_id, EnsureInstance(spec, peers))
            case do.StopInstance(instance_id, node_id, drain_s, reason):
                self.counters.num_stops += 1
                log.info("instance stop", instance=instance_id, node=node_id, reason=reason)
                self._links.send(node_id, StopInstance(instance_id, drain_s))
            case do.Preload(node_id, digest, reason):
                log.info("preload", digest=digest, node=node_id, reason=reason)
                self._links.send(node_id, Preload(digest))
            case do.CopyCheckpoint():
                self._imports.bring(action, self._post)
            case do.PrepareAdapter(instance_id, node_id, digest):
                self._links.send(node_id, PrepareAdapter(instance_id, digest))
            case do.DeleteCheckpoint(digest) if self._janitor.num_registering:
                log.info("checkpoint kept while something is being registered", digest=digest)
            case do.DeleteCheckpoint(digest, reason):
                log.info("checkpoint deleted", digest=digest, reason=reason)
                self._links.broadcast(DeleteCheckpoint(digest))
            case do.SolvePlan():
                self._solver.ask(action)
            case do.WakeAt(at):
                self._set_wake(at - now)

    def _dispatch(self, action: do.Dispatch, now: Seconds) -> None:
        handle = self._handles.get(action.request_id)
        if handle is None:
            self._post(happened.RequestCancelled(action.request_id))
            return
        self.counters.num_dispatches += 1
        self.counters.num_redispatches += action.attempt > 1
        track = self._tracks.get(action.instance_id)
        if track is None:
            track = self._tracks[action.instance_id] = InstanceTrack(action.instance_id, action.node_id, now, 0.0)
        handle.dispatched(action.attempt, track, now)
        resumed = tuple(handle.generated_token_ids)
        request = replace(handle.request, priority=action.priority)
        frame = Submit(action.instance_id, request, action.attempt, resumed, action.predicted_tokens)
        self._links.send(action.node_id, frame)

    def _cancel(self, handle: RequestHandle) -> None:
        request_id = handle.request.request_id
        handle.end(None)
        self._handles.pop(request_id, None)
        self._post(happened.RequestCancelled(request_id, len(handle.generated_token_ids)))

    def _end(self, request_id: RequestId, error: NearlineError) -> None:
        if (handle := self._handles.pop(request_id, None)) is not None:
            handle.end(error)
            if handle.attempt:
                self._post(happened.RequestRejected(request_id, len(handle.generated_token_ids)))

    def _set_wake(self, delay_s: Seconds) -> None:
        if self._wake is not None:
            self._wake.cancel()
        self._wake = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._post, happened.Woke())

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._config.check_interval_s)
            try:
                for node_id, digest in self._janitor.sweep(self.core.fleet, CLOCK()):
                    log.info("checkpoint deleted: no name needs it", digest=digest, node=node_id)
                    self._links.send(node_id, DeleteCheckpoint(digest))
                for instance_id in [i for i in self._tracks if i not in self.core.fleet.instances]:
                    del self._tracks[instance_id]
                self.core.check()
            except Exception as problem:  # or what follows from it; it is looked at again
                self.counters.num_check_failures += 1
                log.error("an invariant of the core does not hold", problem=repr(problem))
