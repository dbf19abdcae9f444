"""The engine process's loop: hear the agent, take a step, tell the agent. One thread, no waiting while there is work.

Nothing here dies for a request: what a request can do wrong becomes its own ERROR update. The process ends when the
agent closes the socket (0), speaks another language (2), or the bytes of the bound model turn out to be bad (3).
"""

import logging
import os
import time

from nearline.engine.adapter_reader import AdapterRead, AdapterReader
from nearline.engine.adapter_sources import READ_LIMIT_S, AdapterSources
from nearline.engine.adapters import FreeAdapter, ReadAdapter
from nearline.engine.core import EngineLoad
from nearline.engine.grammar_compiler import GrammarCompiler
from nearline.engine.instance import LOST, BoundInstance, EngineHabits, bind_instance
from nearline.engine.link import AgentLink, LinkClosed
from nearline.engine.profiler import Profiler
from nearline.loader import MappedPool
from nearline.protocol import FinishReason, ModelId, Seconds, SequenceUpdate, WireError
from nearline.protocol.errors import ErrorInfo, InstanceFailed, Overloaded, StartTimeout
from nearline.protocol.frames import (
    Abort,
    AdapterBytes,
    AdapterEvicted,
    AdapterLoaded,
    Bind,
    BindFailed,
    Bound,
    CancelTask,
    EngineReady,
    ExtentsFree,
    FramesFree,
    LoadAdapter,
    Ping,
    Pong,
    PoolLayout,
    ProfileFinished,
    ProfileInstance,
    ProfileProgress,
    StepDone,
    Submit,
    TaskFailed,
    ToEngine,
    Unbind,
    Unbound,
    UnloadAdapter,
    Yield,
)

EXIT_CLOSED, EXIT_MALFORMED, EXIT_LOST = 0, 2, 3
IDLE_S: Seconds = 1.0
"""Without work for so long, a bound engine prepares for structured output."""
_NO_LOAD = EngineLoad(0, 0, 0)
log = logging.getLogger(__name__)


class EngineServer:
    """Owns the bound instance, if there is one. `pool_fd` and `ready_fd` are the agent's DRAM pool."""

    def __init__(self, link: AgentLink, pool_fd: int, ready_fd: int, habits: EngineHabits) -> None:
        self._link = link
        self._pool_fds = (pool_fd, ready_fd)
        self._habits = habits
        self._pool: MappedPool | None = None
        self._instance: BoundInstance | None = None
        self._reader = AdapterReader(link.wake, READ_LIMIT_S)
        self._sources = AdapterSources(self._read_adapter, link.send)
        self._compiler = GrammarCompiler(link.wake)
        self._profiler: Profiler | None = None
        self._last_model = ModelId("")
        self._updates: list[SequenceUpdate] = []
        self._told = _NO_LOAD

    def serve(self, warmup_s: Seconds) -> int:
        """Serve until the agent goes. Returns the exit code."""
        try:
            self._link.send(EngineReady(os.getpid(), self._habits.device, warmup_s))
            while True:
                has_stepped = self._step()
                self._tell()
                has_stepped = self._profile(has_stepped) or has_stepped
                messages = self._link.receive(0.0 if has_stepped else self._patience_s())
                if not messages and not has_stepped:
                    self._prepare_grammars()
                for message in messages:
                    self._handle(message)
        except LinkClosed as closed:
            log.info("%s; exiting", closed)
            return EXIT_CLOSED
        except WireError as error:
            log.error("the node agent sent what is not a message: %s; exiting", error)
            return EXIT_MALFORMED
        except LOST as error:
            self._give_up(ErrorInfo.of(error).while_serving(self._bound.spec.digest))
            return EXIT_LOST

    def _step(self) -> bool:
        """Take a step if something can run. Returns whether it did."""
        instance = self._instance
        self._take_in_adapters()
        if instance is None:
            return False
        self._tend_adapters(instance)
        for compiled in self._compiler.finished():
            self._start(compiled.submit, compiled.error)
        updates = instance.step(time.monotonic)
        self._updates += updates or []
        if instance.lets_go_of_frames():
            self._link.send(FramesFree(instance.spec.instance_id))
        return updates is not None

    def _patience_s(self) -> Seconds | None:
        """How long to wait for the agent before doing, or looking at, what nobody has asked for yet."""
        instance, now = self._instance, time.monotonic()
        is_busy = instance is not None and (instance.grammars.is_unprepared or instance.awaits_copies)
        dues = (self._sources.next_due, self._reader.next_due(now))
        waits = [IDLE_S] * is_busy + [max(0.0, at - now) for at in dues if at is not None]
        return min(waits, default=None)

    def _prepare_grammars(self) -> None:
        """Read the vocabulary that structured output needs while nothing runs: it holds the interpreter for a while."""
        instance = self._instance
        if instance is not None and instance.grammars.is_unprepared and instance.core.load == _NO_LOAD:
            self._compiler.prepare(instance.grammars)

    def _profile(self, has_stepped: bool) -> bool:
        """Measure one step for a profile if there is one under way and nothing else to do. Returns whether it did."""
        profiler = self._profiler
        if profiler is None:
            return False
        load = self._bound.core.load
        if has_stepped or load.num_running or load.num_waiting:
            said: object = profiler.wait()
        else:
            said = profiler.advance()
        if said is not None:
            self._link.send(said)
        if isinstance(said, (ProfileFinished, TaskFailed)):
            self._profiler = None
        return isinstance(said, ProfileProgress)

    def _start_profile(self, wish: ProfileInstance) -> None:
        if self._instance is not None and self._profiler is None and self._serves(wish.instance_id):
            self._profiler = self._instance.profiler(wish)
            return
        refused = Overloaded(f"instance {wish.instance_id} is being profiled already, or does not run here any more")
        self._link.send(TaskFailed(wish.task_id, ErrorInfo.of(refused)))

    def _end_profile(self, reason: str) -> None:
        if self._profiler is not None:
            failed = ErrorInfo.of(InstanceFailed(f"{reason}; profile the model again"))
            self._link.send(TaskFailed(self._profiler.wish.task_id, failed))
        self._profiler = None

    def _take_in_adapters(self) -> None:
        instance = self._instance
        for read in self._reader.finished():
            if read.lease_id:
                self._link.send(ExtentsFree(read.lease_id))
            if instance is None or read.owner is not instance:
                continue
            if self._sources.ended(read.digest):
                self._take_in(instance, read)
            elif not instance.core.adapters.is_placed(read.digest):
                instance.free_adapter(read.digest)  # it came after it was given up, and nobody has asked again
        if instance is None:
            return
        now = time.monotonic()
        overdue = self._sources.overdue(now)
        overdue += [job.digest for job in self._reader.overdue(now) if self._sources.ended(job.digest)]
        for digest in overdue:
            text = (
                f"adapter {digest} was not read within {READ_LIMIT_S:g} s: the disk of its node hangs or is overloaded"
            )
            late = StartTimeout(f"{text}; try again later")
            self._take_in(instance, AdapterRead(instance, digest, READ_LIMIT_S, 0, ErrorInfo.of(late), lease_id=0))

    def _take_in(self, instance: BoundInstance, read: AdapterRead) -> None:
        if read.error is None:
            instance.core.adapter_loaded(read.digest, read.num_bytes, time.monotonic())
        else:
            log.warning("adapter %s cannot be loaded: %s", read.digest, read.error.message)
            self._updates += instance.core.adapter_failed(read.digest, read.error, time.monotonic())
        self._link.send(AdapterLoaded(read.digest, read.load_s, read.num_bytes, read.error))

    def _tend_adapters(self, instance: BoundInstance) -> None:
        for action in instance.core.adapter_actions():
            if isinstance(action, FreeAdapter):
                instance.free_adapter(action.digest)
                self._link.send(AdapterEvicted(action.digest))
            else:
                self._sources.read(action, time.monotonic())
        self._sources.settle()

    def _read_adapter(self, action: ReadAdapter, lent: AdapterBytes | None) -> None:
        extents, lease_id = (lent.extents, lent.lease_id) if lent else ((), 0)
        load = self._bound.read_adapter(action.digest, action.directory, extents)
        self._reader.start(self._bound, action.digest, load, lease_id)

    def _tell(self) -> None:
        """Send what has happened since the last time in one frame: updates, or just a load that has changed."""
        load = self._instance.core.load if self._instance else _NO_LOAD
        if self._updates or load != self._told:
            updates, self._updates, self._told = tuple(self._updates), [], load
            self._link.send(StepDone(updates, load.num_running, load.num_waiting, load.kv_tokens_used))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort() if self._serves(message.instance_id):
                self._compiler.forget(message.request_id)
                self._bound.core.abort(message.request_id, time.monotonic())
            case Yield() if self._serves(message.instance_id):
                self._bound.core.yield_place(message.request_id)
            case LoadAdapter():
                self._load_adapter(message)
            case AdapterBytes():
                self._sources.offer(message, time.monotonic())
            case UnloadAdapter(digest) if self._instance:
                self._instance.core.unload_adapter(digest)
            case Ping(number):
                self._link.send(Pong(number, self._instance.core.longest_step_s if self._instance else 0.0))
            case ProfileInstance():
                self._start_profile(message)
            case CancelTask(task_id):
                if self._profiler is not None and self._profiler.wish.task_id == task_id:
                    self._profiler = None
            case Bind():
                self._bind(message)
            case Unbind():
                self._unbind()
            case PoolLayout() if self._pool is None:
                self._pool = MappedPool(*self._pool_fds, message)
                if self._habits.device == "cpu":
                    self._pool.fault_ahead()
            case _:
                log.info("%s came when no such instance is bound; ignored", type(message).__name__)

    @property
    def _bound(self) -> BoundInstance:
        assert self._instance is not None
        return self._instance

    def _serves(self, instance_id: str) -> bool:
        return self._instance is not None and self._instance.spec.instance_id == instance_id

    def _submit(self, submit: Submit) -> None:
        if not self._serves(submit.instance_id):
            lost = InstanceFailed(f"instance {submit.instance_id} is not bound in this engine; send again")
            self._start(submit, ErrorInfo.of(lost))
            return
        grammar = submit.request.sampling.grammar
        self._compiler.forget(submit.request.request_id)
        if grammar is None or self._bound.grammars.has(grammar):
            self._start(submit, None)
        else:
            self._compiler.hold(submit, self._bound.grammars)

    def _start(self, submit: Submit, error: ErrorInfo | None) -> None:
        """Begin a sequence, or say why it cannot."""
        request, attempt = submit.request, submit.attempt
        if error is not None:
            self._updates.append(SequenceUpdate(request.request_id, attempt, (), FinishReason.ERROR, error=error))
            return
        self._updates += self._bound.core.add(
            request, attempt, submit.generated_token_ids, time.monotonic(), submit.predicted_tokens
        )

    def _load_adapter(self, wish: LoadAdapter) -> None:
        instance = self._instance
        if instance is not None:
            self._sources.know(wish.digest, wish.is_pooled)
        if wish.lent:
            self._sources.offer(wish.lent, time.monotonic())
        if instance is not None and instance.core.load_adapter(wish.digest, wish.directory, wish.is_ahead):
            self._link.send(AdapterLoaded(wish.digest, 0.0, 0))

    def _bind(self, bind: Bind) -> None:
        if self._pool is None:
            raise WireError("Bind came before PoolLayout")
        try:
            if self._instance is not None:
                raise InstanceFailed(f"this engine is bound to {self._instance.spec.instance_id}; unbind it first")
            self._instance, bind_s = bind_instance(bind, self._pool, self._habits)
        except Exception as error:
            log.exception("cannot bind %s", bind.spec.instance_id)
            self._link.send(BindFailed(bind.spec.instance_id, ErrorInfo.of(error)))
            return
        self._last_model = bind.spec.model_id
        core = self._instance.core
        kv_tokens = core.config.kv_tokens
        log.info("bound %s in %.1f ms, KV cache of %d tokens", bind.spec.instance_id, 1e3 * bind_s, kv_tokens)
        self._link.send(Bound(bind.spec.instance_id, bind_s, kv_tokens, core.longest_step_s))

    def _unbind(self) -> None:
        if self._instance is not None:
            log.info("unbinding %s", self._instance.spec.instance_id)
            self._compiler.forget_all()
            self._tell()
            self._end_profile("the instance was stopped, as it is when others wait for its slot")
            self._instance.close()
        self._sources.unbound()
        self._reader.give_up_all()
        self._instance, self._told = None, _NO_LOAD
        self._link.send(Unbound(self._last_model))

    def _give_up(self, error: ErrorInfo) -> None:
        """End everyone with the reason, say that the instance is lost, and let the process end with its bytes."""
        log.error("the instance is lost: %s; exiting", error.message)
        instance = self._bound
        try:
            for submit in self._compiler.forget_all():
                self._start(submit, error)
            self._updates += instance.core.fail_all(error, time.monotonic())
            self._tell()
            self._end_profile("the instance is lost")
            self._link.send(BindFailed(instance.spec.instance_id, error))
        except LinkClosed:
            log.info("nobody is left to tell")
