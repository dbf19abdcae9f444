"""Imports of checkpoints: in subprocesses, few at a time, progress passed on, every one with an outcome.

What was evicted from SSD comes back the same way, from where it came first.
"""

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from nearline.checkpoint_store import CheckpointStore, Room
from nearline.node_agent.import_process import ImportProcess
from nearline.node_agent.watched import watched
from nearline.protocol import (
    PEER,
    TOKEN_VARIABLE,
    Bytes,
    CheckpointInfo,
    CheckpointKind,
    Digest,
    Seconds,
    TaskId,
    from_plain,
    peer_source,
    source_key,
    to_plain,
)
from nearline.protocol.errors import Cancelled, CheckpointCorrupt, ErrorInfo, NearlineError
from nearline.protocol.frames import ImportCheckpoint, ImportFinished, TaskFailed, TaskProgress

MAX_RUNNING = 2
"""Imports at once, beside what is fetched for instances."""
IDLE_S: Seconds = 5.0
"""How long an adapter's importing process waits for the next one."""
log = structlog.get_logger()

Key = tuple[CheckpointKind, str, Digest | None]


@dataclass(slots=True, eq=False)
class _Job:
    """One source being imported, and the tasks that wait for it: two wishes for one source are one import."""

    wish: ImportCheckpoint
    tasks: dict[TaskId, None] = field(default_factory=dict)
    runner: "asyncio.Task[None] | None" = None


@dataclass(slots=True, eq=False)
class _Fetch:
    """One checkpoint being brought back, and who waits for it: each hears when it has come further.

    `known` are those that stay although it finds them: they were there before it, or were imported meanwhile."""

    task: "asyncio.Task[None] | None" = None
    waiting: list[Callable[[], None]] = field(default_factory=list)
    known: set[Digest] = field(default_factory=set)

    def moved(self) -> None:
        for moved in self.waiting:
            moved()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Turn:
    """The right to read a source. Who has it and who waits for it hear when who has it comes further."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    listeners: list[Callable[[], None]] = field(default_factory=list)


class Imports:
    """Owns the import subprocesses, which ask the store for room. `send` passes messages to the controller."""

    def __init__(
        self, root: Path, send: Callable[[object], None], store: CheckpointStore, token: str | None = None
    ) -> None:
        """`token` is what other nodes want to hear before they give a chunk."""
        self._environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        self._peer_environment = self._environment | ({TOKEN_VARIABLE: token} if token else {})
        self._peers: dict[Digest, tuple[str, ...]] = {}
        self._root = root
        self._send = send
        self._store = store
        self._jobs: dict[Key, _Job] = {}
        self._idle: list[ImportProcess] = []
        self._endings: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(MAX_RUNNING)
        self._fetches: dict[Digest, _Fetch] = {}
        self._turns: weakref.WeakValueDictionary[str, _Turn] = weakref.WeakValueDictionary()
        self._unnamed: dict[Digest, None] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    def start(self, wish: ImportCheckpoint) -> None:
        """Begin, queue, or join the import of the same source that already runs."""
        key = (wish.kind, wish.source, wish.base_digest)
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(wish)
            job.runner = watched(self._run(key, job), f"import-{wish.task_id}")
        job.tasks[wish.task_id] = None

    def cancel(self, task_id: TaskId) -> None:
        """Leave an import; the last one to leave ends it."""
        for key, job in list(self._jobs.items()):
            if task_id in job.tasks:
                del job.tasks[task_id]
                self._send(TaskFailed(task_id, ErrorInfo.of(Cancelled(f"import of {job.wish.source} was cancelled"))))
                if not job.tasks and job.runner:
                    del self._jobs[key]
                    job.runner.cancel()

    def tell_peers(self, digest: Digest, peers: tuple[str, ...]) -> None:
        """Remember which nodes hold a checkpoint, in case it must be fetched."""
        self._peers[digest] = peers

    async def fetch(self, digest: Digest, moved: Callable[[], None]) -> None:
        """Bring back a checkpoint that was evicted from SSD: from another node if one has it, else from its source.

        At once, whatever is imported meanwhile: an instance holds its slot for it. `moved` is called whenever it has
        come further. Who is cancelled waits no more; when nobody does, it ends.
        Raises what the import raises, or CheckpointCorrupt when the source holds something else by now.
        """
        fetch = self._fetches.get(digest)
        if fetch is None:
            fetch = self._fetches[digest] = _Fetch()
            fetch.task = asyncio.create_task(self._fetch(digest, fetch), name=f"fetch-{digest}")
        assert fetch.task is not None, "it begins with its task"
        fetch.waiting.append(moved)
        try:
            await asyncio.shield(fetch.task)
        finally:
            fetch.waiting.remove(moved)
            if not fetch.waiting and self._fetches.get(digest) is fetch:
                del self._fetches[digest]
                fetch.task.cancel()

    async def _fetch(self, digest: Digest, fetch: _Fetch) -> None:
        if not self._store.is_remote(digest):  # somebody else brought it meanwhile
            return
        info = self._store.manifest(digest).info
        peers = self._peers.get(digest, ())
        if peers and await self._fetch_from(peers, info, fetch.moved):
            return
        log.info("fetching a checkpoint again", digest=digest, source=info.source)
        wish = ImportCheckpoint(TaskId(f"fetch-{digest}"), info.kind, info.source, info.base_digest)
        async with self._turn(info.source, fetch.moved):
            if not self._store.is_remote(digest):  # the import before us has brought it
                return
            fetch.known.update(manifest.digest for manifest in self._store.checkpoints())
            found = await self._import(_Job(wish))
        if found.digest != digest:
            if found.digest not in fetch.known:
                self._unnamed[found.digest] = None
                self._delete_unnamed()
            raise CheckpointCorrupt(
                f"{info.source} is not what it was: it makes checkpoint {found.digest}, {digest} was imported from it; "
                "register the model again"
            )

    @contextlib.asynccontextmanager
    async def _turn(self, source: str, moved: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Wait to be the one who reads a source: the importer refuses one that is being read already."""
        turn = self._turns.setdefault(source_key(source), _Turn())
        turn.listeners.append(moved)
        try:
            async with turn.lock:
                yield
        finally:
            turn.listeners.remove(moved)

    def _delete_unnamed(self) -> None:
        """Delete what a fetch found instead of what it was to bring, unless an import finds the same for a name."""
        if not self._jobs:
            for digest in self._unnamed:
                deleting = watched(asyncio.to_thread(self._store.delete, digest), f"delete {digest}")
                self._deleting.add(deleting)
                deleting.add_done_callback(self._deleting.discard)
            self._unnamed = {}

    async def _fetch_from(self, peers: tuple[str, ...], info: CheckpointInfo, moved: Callable[[], None]) -> bool:
        """Copy a checkpoint from other nodes; False if they do not give it, for whatever reason."""
        source = peer_source(info.digest, peers)
        log.info("fetching a checkpoint from peers", digest=info.digest, peers=peers)
        wish = ImportCheckpoint(TaskId(f"fetch-{info.digest}"), info.kind, source)
        try:
            async with self._turn(source, moved):
                if self._store.is_remote(info.digest):
                    await self._import(_Job(wish))
        except NearlineError as error:
            log.warning("no peer gives the checkpoint", digest=info.digest, code=error.code, error=error.message)
            return False
        return True

    async def close(self) -> None:
        """End all imports and wait until their processes are gone."""
        runners = [job.runner for job in self._jobs.values() if job.runner]
        runners += [fetch.task for fetch in self._fetches.values() if fetch.task]
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        await asyncio.gather(*self._deleting, return_exceptions=True)
        idle, self._idle = self._idle, []
        await asyncio.gather(*(process.end() for process in idle), *self._endings)

    async def _run(self, key: Key, job: _Job) -> None:
        try:
            self._tell(job, lambda task_id: TaskProgress(task_id, "queued", 0, 0))
            async with self._room, self._turn(job.wish.source):
                if self._deleting:
                    await asyncio.wait(self._deleting)
                checkpoint = await self._import(job)
            self._unnamed.pop(checkpoint.digest, None)
            for fetch in self._fetches.values():
                fetch.known.add(checkpoint.digest)
            self._tell(job, lambda task_id: ImportFinished(task_id, checkpoint))
        except Exception as error:
            info = ErrorInfo.of(error)
            log.warning("import failed", source=job.wish.source, code=info.code, error=info.message)
            self._tell(job, lambda task_id: TaskFailed(task_id, info))
        finally:
            if self._jobs.get(key) is job:
                del self._jobs[key]
            self._delete_unnamed()

    async def _import(self, job: _Job) -> CheckpointInfo:
        """Import in a process of its own. Adapters, of which there may be thousands, follow each other in one; only one
        that copies from peers is told the cluster's token."""
        is_copy = job.wish.source.startswith(PEER)
        may_follow = job.wish.kind is CheckpointKind.ADAPTER and not is_copy
        process = self._idle.pop() if may_follow and self._idle else None
        if process is None or not process.is_alive:
            process = await ImportProcess.start(self._root, self._peer_environment if is_copy else self._environment)
        rooms: list[Room] = []
        is_over = False
        try:
            outcome = await self._outcome(process, job, rooms)
            is_over = True
            if "checkpoint" in outcome:
                checkpoint = from_plain(CheckpointInfo, outcome["checkpoint"])
                await asyncio.to_thread(self._store.adopt, checkpoint.digest)
                return checkpoint
        finally:
            if is_over and may_follow:
                self._keep(process)
            else:
                await process.end()
            for room in rooms:
                self._store.give_up(room)
        raise from_plain(ErrorInfo, outcome["error"]).exception()

    def _keep(self, process: ImportProcess) -> None:
        """Let an adapter's process wait a while for the next one."""
        self._idle.append(process)
        asyncio.get_running_loop().call_later(IDLE_S, self._let_go, process)

    def _let_go(self, process: ImportProcess) -> None:
        if process in self._idle:
            self._idle.remove(process)
            ending = watched(process.end(), "end of an import process")
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _outcome(self, process: ImportProcess, job: _Job, rooms: list[Room]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        last: tuple[str, int] | None = None
        async for said in process.ask(job.wish):
            if "needs_bytes" in said:
                await self._make_room(process, said["needs_bytes"], rooms)
            elif "phase" in said:
                if said["phase"] in ("writing", "copying") and rooms:
                    rooms[-1].written_bytes = said["done_bytes"]
                if (said["phase"], said["done_bytes"]) != last:
                    last = (said["phase"], said["done_bytes"])
                    for moved in self._turns[source_key(job.wish.source)].listeners:
                        moved()
                for task_id in job.tasks:
                    self._send(TaskProgress(task_id, said["phase"], said["done_bytes"], said["total_bytes"]))
        return said

    async def _make_room(self, process: ImportProcess, num_bytes: Bytes, rooms: list[Room]) -> None:
        answer: dict[str, Any] = {}
        promising = asyncio.create_task(asyncio.to_thread(self._store.reserve, num_bytes))
        try:
            rooms.append(await asyncio.shield(promising))
        except asyncio.CancelledError:
            promising.add_done_callback(self._unwanted)  # the thread goes on: its promise would stand for ever
            raise
        except NearlineError as error:
            answer = {"error": to_plain(ErrorInfo.of(error))}
        await process.answer(answer)

    def _unwanted(self, done: "asyncio.Task[Room]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._store.give_up(done.result())

    def _tell(self, job: _Job, message: Callable[[TaskId], object]) -> None:
        for task_id in job.tasks:
            self._send(message(task_id))
