"""The agent at work: one task owns NodeCore, carries out what it decides and posts what came of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from nearline.checkpoint_store import MANIFEST_NAME, CheckpointStore
from nearline.node_agent import actions as act
from nearline.node_agent import events as ev
from nearline.node_agent.adapter_leases import AdapterLeases
from nearline.node_agent.config import Hardware, NodeConfig, resolve
from nearline.node_agent.core import NodeCore
from nearline.node_agent.errands import Errands
from nearline.node_agent.heartbeat import Heartbeat
from nearline.node_agent.imports import Imports
from nearline.node_agent.leases import Leases
from nearline.node_agent.lifecycle import is_final
from nearline.node_agent.link import ControllerLink
from nearline.node_agent.profiles import Profiles, Profiling
from nearline.node_agent.relay import Relay, RelayPorts
from nearline.node_agent.supervisor import Supervisor, launches
from nearline.node_agent.types import EngineId
from nearline.protocol import PEER, CheckpointInfo, InstanceId, InstanceState, NodeId, NodeReport, Seconds
from nearline.protocol import frames as fr
from nearline.protocol.errors import ErrorInfo, InstanceFailed, NearlineError

FIRST_REPORT_INTERVAL_S: Seconds = 1.0
REPORT_SOON_S: Seconds = 0.1
"""Changes within this time share one Report, so that reports keep out of the way of a start."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who this node is. `host` may be a wildcard: the link then says which address the controller reaches. A loopback
    address means the controller's machine, to whoever dials that from another."""

    node_id: NodeId
    host: str
    port: int

    def http_url(self, local_host: str) -> str:
        host = local_host if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class NodeRuntime:
    """Owns the mind, the link, the engine processes, the leases and the imports, while `run` runs."""

    def __init__(self, config: NodeConfig, hardware: Hardware, store: CheckpointStore, identity: NodeIdentity) -> None:
        self._identity = identity
        self._store = store
        self._local_host = "127.0.0.1"
        self._report_interval_s = FIRST_REPORT_INTERVAL_S
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reporting: asyncio.TimerHandle | None = None
        self._core_config = resolve(config, hardware)
        self._core = NodeCore(self._core_config)
        self._imports = Imports(config.data_dir / "store", self._send_outcome, store, config.token)
        self._leases = Leases(store, self._inbox.put_nowait, self._imports.fetch)
        pool = store.pool
        self._supervisor = Supervisor(
            launches(config, hardware, pool.fd, pool.ready_fd, pool.layout), self._on_frame, self._on_exit
        )
        post = self._inbox.put_nowait
        self._link = ControllerLink(
            config.controller_url, config.token, self._hello, self._hear, lambda: post(ev.LinkLost())
        )
        self._adapter_leases = AdapterLeases(store, self._supervisor.send)
        ports = RelayPorts(
            self._supervisor.send,
            self._link.send,
            store.directory,
            lambda instance_id: post(ev.Drained(instance_id)),
            self._adapter_leases.lend,
        )
        self._relay = Relay(ports)
        self._profiles = Profiles(config.data_dir / "profiles")
        self._profiling = Profiling(self._profiles, self._supervisor.send, self._link.send)
        self._heartbeat = Heartbeat(self._supervisor.send, self._supervisor.kill_hung, config.hang_timeout_s)
        self._errands = Errands(store, self._send_outcome)
        self._message_handlers = self._handlers_of_messages()
        self._action_handlers = self._handlers_of_actions()

    async def run(self) -> None:
        """Work until cancelled, then end engines and imports and give every pin back."""
        try:
            self._inbox.put_nowait(ev.Woke())
            async with asyncio.TaskGroup() as group:
                group.create_task(self._link.run(), name="link")
                group.create_task(self._report_forever(), name="report")
                group.create_task(self._heartbeat.run(), name="heartbeat")
                group.create_task(self._own(), name="owner")
        finally:
            for timer in (self._timer, self._reporting):
                if timer:
                    timer.cancel()
            await asyncio.gather(self._supervisor.close(), self._imports.close())
            self._errands.close()
            self._adapter_leases.close()
            self._leases.close()

    def health(self) -> dict[str, Any]:
        """Describe the node for GET /health."""
        return {
            "status": "ok",
            "node_id": self._identity.node_id,
            "is_linked": self._link.is_up,
            "num_instances": len(self._core.statuses()),
            "num_prewarmed": self._core.num_prewarmed,
        }

    async def _own(self) -> None:
        while True:
            self._take(await self._inbox.get())

    def _hear(self, message: Any) -> None:
        """Take what the controller says after all that came before it, at once when that is done: turns cost time."""
        if self._inbox.empty():
            self._take(message)
        else:
            self._inbox.put_nowait(message)

    def _take(self, item: Any) -> None:
        handler = self._message_handlers.get(type(item))
        if handler:
            self._guard(handler, item)
        else:
            self._decide(item)

    def _decide(self, event: ev.NodeEvent) -> None:
        for action in self._core.on(event, self._loop.time()):
            self._guard(self._action_handlers[type(action)], action)
        if not isinstance(event, ev.Woke):
            self._report_soon()

    def _guard(self, handler: Callable[[Any], None], item: Any, instance_id: InstanceId | None = None) -> None:
        """Carry something out. What breaks is the failure of the instance (this one, or the one that the item names) or
        process it was for, not the agent's."""
        try:
            handler(item)
        except Exception as error:
            what = type(item).__name__
            log.exception("the agent could not do its part", what=what)
            instance_id = instance_id or getattr(getattr(item, "spec", item), "instance_id", None)
            if isinstance(item, act.StartEngine):
                self._inbox.put_nowait(ev.EngineExited(item.engine_id, f"it could not be started: {error}"))
            elif instance_id is not None:
                self._inbox.put_nowait(ev.ActionFailed(instance_id, _failure(what, error)))

    # ---- what comes in ----

    def _handlers_of_messages(self) -> dict[type, Callable[[Any], None]]:
        return {
            ev.EngineExited: self._engine_exited,
            ev.LeaseFilled: self._lease_filled,
            ev.LinkLost: self._link_lost,
            fr.Welcome: self._welcome,
            fr.EnsureInstance: self._ensure,
            fr.StopInstance: lambda m: self._decide(ev.StopWished(m.instance_id, m.drain_s)),
            fr.Submit: self._submit,
            fr.Abort: self._relay.abort,
            fr.Yield: self._relay.yield_place,
            fr.PrepareAdapter: lambda m: self._relay.prepare_adapter(m, self._core.state(m.instance_id)),
            fr.ImportCheckpoint: self._import,
            fr.CancelTask: self._cancel_task,
            fr.DeleteCheckpoint: lambda m: self._decide(ev.DeleteWished(m.digest)),
            fr.Preload: lambda m: self._leases.run("preload", self._store.preload, m.digest),
            fr.EvictCheckpoint: self._errands.evict,
            fr.VerifyCheckpoint: self._errands.verify,
            fr.ProfileInstance: self._profile,
        }

    def _ensure(self, message: fr.EnsureInstance) -> None:
        self._imports.tell_peers(message.spec.digest, tuple(map(self._link.seen_from_here, message.peers)))
        self._decide(ev.EnsureWished(message.spec, self._checkpoint(message.spec.digest)))

    def _import(self, message: fr.ImportCheckpoint) -> None:
        is_copy = message.source.startswith(PEER)
        source = self._link.seen_from_here(message.source) if is_copy else message.source
        self._imports.start(replace(message, source=source))

    def _engine_exited(self, event: ev.EngineExited) -> None:
        self._decide(event)  # answers its sequences, so the relay forgets it only afterwards
        self._relay.unbind(event.engine_id)
        self._adapter_leases.gone(event.engine_id)
        self._heartbeat.gone(event.engine_id)
        self._profiling.engine_gone(event.engine_id)

    def _lease_filled(self, event: ev.LeaseFilled) -> None:
        self._decide(event)
        self._heartbeat.filled(event.instance_id)

    def _link_lost(self, event: ev.LinkLost) -> None:
        self._decide(event)
        self._profiling.cancel_all()

    def _profile(self, message: fr.ProfileInstance) -> None:
        is_ready = self._core.state(message.instance_id) is InstanceState.READY
        engine_id = self._relay.engine_of(message.instance_id) if is_ready else None
        self._profiling.start(message, engine_id, self._relay.is_busy)

    def _welcome(self, message: fr.Welcome) -> None:
        self._report_interval_s = message.report_interval_s
        log.info("welcomed", fencing_token=message.fencing_token, report_interval_s=message.report_interval_s)

    def _submit(self, message: fr.Submit) -> None:
        self._relay.submit(message, self._core.state(message.instance_id) is InstanceState.READY)

    def _checkpoint(self, digest: Any) -> CheckpointInfo | None:
        try:
            return self._store.manifest(digest).info
        except NearlineError:
            return None

    def _cancel_task(self, message: fr.CancelTask) -> None:
        self._imports.cancel(message.task_id)
        self._errands.cancel(message.task_id)
        self._profiling.cancel(message.task_id)

    def _send_outcome(self, message: object) -> None:
        if isinstance(message, fr.ImportFinished):
            self._decide(ev.DeleteUnwished(message.checkpoint.digest))
        if isinstance(message, fr.TaskFinished):  # who waits for it may look at the fleet right after
            self._send_report()
        self._link.send(message)
        if not isinstance(message, fr.TaskProgress):
            self._report_soon()

    # ---- what the mind decides ----

    def _handlers_of_actions(self) -> dict[type, Callable[[Any], None]]:
        return {
            act.StartEngine: self._start_engine,
            act.BindEngine: self._bind_engine,
            act.UnbindEngine: self._unbind_engine,
            act.KillEngine: self._kill_engine,
            act.AcquireCheckpoint: lambda a: self._leases.acquire(a.instance_id, a.digest, a.may_stream),
            act.ReleaseCheckpoint: self._release_checkpoint,
            act.DeleteCheckpoint: self._delete_checkpoint,
            act.SendStatus: self._send_status,
            act.AwaitDrain: lambda a: self._relay.await_drain(a.instance_id),
            act.FailSequences: lambda a: self._relay.fail(a.instance_id, a.error),
            act.AbortSequences: lambda _: self._relay.abort_all(),
            act.WakeAt: self._wake_at,
        }

    def _start_engine(self, action: act.StartEngine) -> None:
        log.info("starting an engine", engine_id=action.engine_id, reason=action.reason)
        self._supervisor.start(action.engine_id, action.device_index)

    def _bind_engine(self, action: act.BindEngine) -> None:
        spec = action.spec
        lease = self._leases.lease(spec.instance_id)
        manifest_path = str(lease.directory / MANIFEST_NAME)
        profile = self._profiles.of(spec.digest)
        sizes = (action.kv_bytes, action.max_running, action.num_threads)
        bind = fr.Bind(spec, manifest_path, lease.frames, *sizes, profile=profile)
        self._relay.bind(action.engine_id, spec.instance_id)
        self._heartbeat.binding(action.engine_id, spec.instance_id)
        self._supervisor.send(action.engine_id, bind)
        self._relay.bind_sent(spec.instance_id)

    def _unbind_engine(self, action: act.UnbindEngine) -> None:
        self._relay.unbind(action.engine_id)
        self._heartbeat.busy(action.engine_id)
        self._supervisor.send(action.engine_id, fr.Unbind())

    def _kill_engine(self, action: act.KillEngine) -> None:
        log.info("ending an engine", engine_id=action.engine_id, reason=action.reason)
        self._relay.unbind(action.engine_id)
        self._heartbeat.gone(action.engine_id)
        self._supervisor.kill(action.engine_id)

    def _release_checkpoint(self, action: act.ReleaseCheckpoint) -> None:
        self._heartbeat.released(action.instance_id)
        self._leases.release(action.instance_id)

    def _delete_checkpoint(self, action: act.DeleteCheckpoint) -> None:
        for instance_id in self._relay.unload_adapter(action.digest):
            self._inbox.put_nowait(ev.AdapterChanged(instance_id, action.digest, False))
        self._profiles.forget(action.digest)
        self._leases.run("delete", self._store.delete, action.digest)

    def _send_status(self, action: act.SendStatus) -> None:
        status = self._relay.with_load(action.status)
        log.info("instance", instance_id=status.instance_id, model_id=status.model_id, state=status.state.value)
        self._link.send(fr.InstanceChanged(status))
        if is_final(status.state):
            self._relay.ended(status.instance_id)

    def _wake_at(self, action: act.WakeAt) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(action.at, self._inbox.put_nowait, ev.Woke())

    # ---- what engines say ----

    def _on_frame(self, engine_id: EngineId, frame: object) -> None:
        """Take what an engine says. If a step's tokens are lost, so is its instance: nobody may go on after a hole."""
        instance_id = self._relay.instance_of(engine_id) if isinstance(frame, fr.StepDone) else None
        self._guard(partial(self._said, engine_id), frame, instance_id)

    def _said(self, engine_id: EngineId, frame: Any) -> None:
        match frame:
            case fr.StepDone():
                self._relay.step_done(engine_id, frame)
            case fr.EngineReady():
                log.info("engine warm", engine_id=engine_id, pid=frame.pid, warmup_s=round(frame.warmup_s, 3))
                self._heartbeat.idle(engine_id)
                self._inbox.put_nowait(ev.EngineWarm(engine_id))
            case fr.FramesFree():
                self._leases.release_when_read(frame.instance_id)
            case fr.AdapterWanted():
                self._adapter_leases.wanted(engine_id, frame.digest)
            case fr.ExtentsFree():
                self._adapter_leases.free(engine_id, frame.lease_id)
            case fr.Pong():
                self._heartbeat.answered(engine_id, frame.number, frame.longest_step_s)
            case fr.ProfileProgress() | fr.ProfileFinished() | fr.TaskFailed():
                self._profiling.heard(frame)
                if isinstance(frame, fr.ProfileFinished):
                    self._send_report()
            case fr.Bound():
                self._heartbeat.bound(frame.instance_id, frame.longest_step_s)
                self._inbox.put_nowait(
                    ev.EngineBound(engine_id, frame.instance_id, frame.bind_s, frame.kv_tokens_total)
                )
            case fr.BindFailed():
                self._inbox.put_nowait(ev.EngineBindFailed(engine_id, frame.instance_id, frame.error))
            case fr.Unbound():
                self._heartbeat.idle(engine_id)
                self._inbox.put_nowait(ev.EngineUnbound(engine_id))
            case fr.AdapterLoaded():
                instance_id = self._relay.adapter_loaded(engine_id, frame)
                if instance_id is not None:
                    self._inbox.put_nowait(ev.AdapterChanged(instance_id, frame.digest, frame.error is None))
            case fr.AdapterEvicted():
                if (instance_id := self._relay.adapter_gone(engine_id, frame.digest)) is not None:
                    self._inbox.put_nowait(ev.AdapterChanged(instance_id, frame.digest, is_loaded=False))

    def _on_exit(self, engine_id: EngineId, how: str) -> None:
        self._inbox.put_nowait(ev.EngineExited(engine_id, how))

    # ---- reports ----

    def _hello(self, local_host: str) -> fr.Report:
        self._local_host = local_host
        return fr.Report(self._report())

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(self._report_interval_s)
            self._send_report()

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = self._loop.call_later(REPORT_SOON_S, self._send_report)

    def _send_report(self) -> None:
        if self._reporting:
            self._reporting.cancel()
        self._reporting = None
        if self._link.is_up:
            self._link.send(fr.Report(self._report()))

    def _report(self) -> NodeReport:
        store, core = self._store, self._core
        return NodeReport(
            node_id=self._identity.node_id,
            http_url=self._identity.http_url(self._local_host),
            devices=self._core_config.devices,
            dram_pool_bytes=store.dram_pool_bytes,
            dram_frame_bytes=store.pool.layout.frame_bytes,
            dram_free_bytes=store.dram_free_bytes(),
            ssd_budget_bytes=store.ssd_budget_bytes(),
            ssd_free_bytes=store.ssd_free_bytes(),
            bandwidths=store.bandwidths(),
            bind_s=core.bind_pace.value_s,
            process_s=core.process_pace.value_s,
            num_prewarmed=core.num_prewarmed,
            residency=store.residency(),
            profiles=self._profiles.all(),
            instances=tuple(self._relay.with_load(status) for status in core.statuses()),
        )


def _failure(what: str, error: Exception) -> ErrorInfo:
    if isinstance(error, NearlineError):
        return ErrorInfo.of(error)
    return ErrorInfo.of(InstanceFailed(f"its node could not do its part ({what}): {type(error).__name__}: {error}"))
