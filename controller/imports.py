"""Bytes that cross the controller's path: imports it asks nodes for, and small text files it fetches from them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from urllib.parse import quote

import aiohttp
import structlog

from nearline.controller.actions import CopyCheckpoint
from nearline.controller.events import CopyFailed, MeasurementBegan, MeasurementEnded
from nearline.controller.node_link import NodeLinks
from nearline.controller.policy.imports import copy_place, import_place, peer_urls
from nearline.controller.shown import shown
from nearline.controller.state import Fleet, InstanceRecord, NodeRecord
from nearline.protocol import Bytes, CheckpointInfo, CheckpointKind, Digest, NodeId, TaskId, peer_source
from nearline.protocol.errors import (
    CheckpointCorrupt,
    ErrorInfo,
    InvalidRequest,
    NearlineError,
    NodeLost,
    NotFound,
    Overloaded,
)
from nearline.protocol.frames import (
    CancelTask,
    DeleteCheckpoint,
    EvictCheckpoint,
    ImportCheckpoint,
    ImportFinished,
    ProfileFinished,
    ProfileInstance,
    ProfileProgress,
    TaskFailed,
    TaskFinished,
    TaskProgress,
    ToAgent,
    VerifyCheckpoint,
)

_FETCH_S = 15.0
_RETRY_S = 5.0
MAX_FILE_BYTES = 64 << 20
Outcome = ImportFinished | TaskFinished | ProfileFinished
Progress = TaskProgress | ProfileProgress
Measurement = MeasurementBegan | MeasurementEnded
ImportFrame = Progress | Outcome | TaskFailed
log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Task:
    node_id: NodeId
    frames: asyncio.Queue[ImportFrame] = field(default_factory=asyncio.Queue)


class Imports:
    """Imports and other tasks on checkpoints under way, each on one node. A caller that goes away cancels its task."""

    def __init__(self, fleet: Fleet, links: NodeLinks, next_id: Callable[[str], str]) -> None:
        self._fleet = fleet
        self._links = links
        self._next_id = next_id
        self._running: dict[TaskId, _Task] = {}
        self._copies: set[asyncio.Task[None]] = set()

    async def run(
        self, kind: CheckpointKind, source: str, base_digest: Digest | None
    ) -> AsyncGenerator[TaskProgress | ImportFinished, None]:
        """Import on the best node and yield progress, then ImportFinished. Raises the import's NearlineError."""
        node = self._choose_node(base_digest)
        task_id = TaskId(self._next_id("import"))
        wish = ImportCheckpoint(task_id, kind, source, base_digest)
        async with aclosing(self._follow(node.node_id, task_id, wish)) as frames:
            async for frame in frames:
                assert isinstance(frame, (TaskProgress, ImportFinished)), f"{task_id} is an import"
                yield frame

    async def verify(self, digest: Digest) -> AsyncGenerator[tuple[NodeId, TaskProgress | TaskFinished], None]:
        """Verify a checkpoint on one node after the other; yield each one's progress, then its TaskFinished.

        Raises NodeLost if no connected node has it, and the NearlineError of the first node where it is wrong.
        """
        for node in self._holders(digest):
            task_id = TaskId(self._next_id("verify"))
            wish = VerifyCheckpoint(task_id, digest)
            async with aclosing(self._follow(node.node_id, task_id, wish)) as frames:
                async for frame in frames:
                    assert isinstance(frame, (TaskProgress, TaskFinished)), f"{task_id} is a verification"
                    yield node.node_id, frame

    async def copy(
        self, checkpoint: CheckpointInfo, wished: NodeId | None
    ) -> AsyncGenerator[tuple[NodeId, TaskProgress | ImportFinished], None]:
        """Copy a checkpoint to a node from those that have it; yield progress, then ImportFinished.

        Raises NodeLost without a node to copy from, InvalidRequest without one to copy to, NotFound for a node nobody
        knows, and what the copy raises.
        """
        nodes = self._fleet.nodes
        if wished is not None and wished not in nodes:
            raise NotFound(f"no node is named {shown(wished)}; there are {', '.join(sorted(nodes))}", param="node")
        node_id = wished or copy_place(nodes.values(), checkpoint.digest)
        if node_id is None:
            reason = "every connected node has this checkpoint already; a copy needs another node"
            raise InvalidRequest(reason, param="node")
        peers = peer_urls(nodes.values(), checkpoint.digest, node_id)
        if not peers:
            raise NodeLost(
                f"no other connected node holds all of checkpoint {checkpoint.digest}", retry_after_s=_RETRY_S
            )
        task_id = TaskId(self._next_id("copy"))
        source = peer_source(checkpoint.digest, peers)
        wish = ImportCheckpoint(task_id, checkpoint.kind, source, checkpoint.base_digest)
        async with aclosing(self._follow(node_id, task_id, wish)) as frames:
            async for frame in frames:
                assert isinstance(frame, (TaskProgress, ImportFinished)), f"{task_id} is a copy"
                if isinstance(frame, ImportFinished):
                    self._check_copy(node_id, frame.checkpoint, checkpoint)
                yield node_id, frame

    def bring(self, action: CopyCheckpoint, tell: Callable[[CopyFailed], None]) -> None:
        """Copy for the core, which hears of the end: of a good one from the node itself, of another one here."""
        log.info("copy", digest=action.checkpoint.digest, node=action.node_id, reason=action.reason)
        copying = asyncio.create_task(self._bring(action, tell), name=f"copy of {action.checkpoint.digest}")
        self._copies.add(copying)
        copying.add_done_callback(self._copies.discard)

    async def _bring(self, action: CopyCheckpoint, tell: Callable[[CopyFailed], None]) -> None:
        digest, node_id = action.checkpoint.digest, action.node_id
        try:
            async with aclosing(self.copy(action.checkpoint, node_id)) as frames:
                async for _ in frames:
                    pass
        except Exception as error:
            info = ErrorInfo.of(error)
            log.warning("copy failed", digest=digest, node=node_id, code=info.code, error=info.message)
            tell(CopyFailed(node_id, digest, info))

    async def close(self) -> None:
        """End the copies that nobody but the core waits for."""
        for copying in self._copies:
            copying.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)

    def _check_copy(self, node_id: NodeId, found: CheckpointInfo, known: CheckpointInfo) -> None:
        """Hold what a node has copied against what is known of it: beyond weights and files, peers might say anything.

        Where it was first imported from, and what was lost then, may differ. Raises CheckpointCorrupt.
        """
        if replace(found, source=known.source, quantization_error=known.quantization_error) != known:
            self._links.send(node_id, DeleteCheckpoint(known.digest))
            raise CheckpointCorrupt(
                f"node {node_id} got checkpoint {known.digest} with another description than was registered; "
                "it is removed there, verify the model on the other nodes"
            )

    async def profile(
        self, digest: Digest, start: Callable[[], Awaitable[None]], tell: Callable[[Measurement], None]
    ) -> AsyncGenerator[tuple[NodeId, ProfileProgress | ProfileFinished], None]:
        """Measure a checkpoint's steps on its least busy instance, after `start` if none is ready. By `tell` the core
        hears of it, and keeps instances awake meanwhile. Raises Overloaded without a ready instance, what `start`
        raises and what the node refuses it with."""
        task_id = TaskId(self._next_id("profile"))
        tell(MeasurementBegan(task_id, digest))
        try:
            if not self._usable(digest):
                await start()
            running = self._usable(digest)
            if not running:
                raise Overloaded("no instance of this model is ready to be measured; try again", retry_after_s=_RETRY_S)
            chosen = min(running, key=lambda instance: (len(instance.in_flight), instance.instance_id))
            node_id, wish = chosen.node.node_id, ProfileInstance(task_id, chosen.instance_id)
            async with aclosing(self._follow(node_id, task_id, wish)) as frames:
                async for frame in frames:
                    assert isinstance(frame, (ProfileProgress, ProfileFinished)), f"{task_id} is a profile"
                    yield node_id, frame
        finally:
            tell(MeasurementEnded(task_id, digest))

    def _usable(self, digest: Digest) -> list[InstanceRecord]:
        return [i for i in self._fleet.instances.values() if i.spec.digest == digest and i.is_usable]

    async def evict(self, digest: Digest) -> Bytes:
        """Give a checkpoint's DRAM back wherever it is not pinned; return the bytes freed. Raises NodeLost."""
        num_bytes = 0
        for node in self._holders(digest):
            task_id = TaskId(self._next_id("evict"))
            wish = EvictCheckpoint(digest, task_id)
            async with aclosing(self._follow(node.node_id, task_id, wish)) as frames:
                async for frame in frames:
                    num_bytes += frame.num_bytes if isinstance(frame, TaskFinished) else 0
        return num_bytes

    async def _follow(
        self, node_id: NodeId, task_id: TaskId, wish: ToAgent
    ) -> AsyncGenerator[Progress | Outcome, None]:
        task = self._running[task_id] = _Task(node_id)
        is_over = False
        try:
            if not self._links.send(node_id, wish):
                raise NodeLost(f"node {node_id} has no link; try again", retry_after_s=_RETRY_S)
            while not is_over:
                frame = await task.frames.get()
                is_over = not isinstance(frame, Progress)
                if isinstance(frame, TaskFailed):
                    raise frame.error.exception()
                yield frame
        finally:
            del self._running[task_id]
            if not is_over:
                self._links.send(node_id, CancelTask(task_id))

    def received(self, node_id: NodeId, frame: ImportFrame) -> None:
        """Pass a node's word on to whoever waits for it; a task nobody waits for is cancelled."""
        task = self._running.get(frame.task_id)
        if task is not None:
            task.frames.put_nowait(frame)
        elif isinstance(frame, Progress):
            self._links.send(node_id, CancelTask(frame.task_id))

    def node_lost(self, node_id: NodeId) -> None:
        """Fail the tasks of a node whose link broke."""
        error = NodeLost(f"node {node_id} was lost meanwhile; try again", retry_after_s=_RETRY_S)
        for task_id, task in self._running.items():
            if task.node_id == node_id:
                task.frames.put_nowait(TaskFailed(task_id, ErrorInfo.of(error)))

    def _holders(self, digest: Digest) -> list[NodeRecord]:
        rows = [(node, node.residency.get(digest)) for _, node in sorted(self._fleet.nodes.items())]
        nodes = [node for node, row in rows if node.is_connected and row and (row.ssd_bytes or row.dram_bytes)]
        if not nodes:
            raise NodeLost(f"no connected node holds bytes of checkpoint {digest}", retry_after_s=_RETRY_S)
        return nodes

    def _choose_node(self, base_digest: Digest | None) -> NodeRecord:
        node_id = import_place(self._fleet.nodes.values(), base_digest)
        if node_id is None:
            raise NodeLost("no node is connected; start one with `nearline node`", retry_after_s=_RETRY_S)
        return self._fleet.nodes[node_id]


class FileFetcher:
    """Fetches a checkpoint's small files from any node that has them. Owns: one HTTP session."""

    def __init__(self, fleet: Fleet, node_token: str) -> None:
        self._fleet = fleet
        headers = {"Authorization": f"Bearer {node_token}"} if node_token else {}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=_FETCH_S))

    async def fetch(self, digest: Digest, name: str) -> bytes:
        """Return one file's bytes. Raises NotFound if the checkpoint has no such file, NodeLost if no node answers."""
        nodes = [node for node in self._fleet.nodes.values() if digest in node.residency]
        failure: NearlineError = NodeLost(f"no connected node holds checkpoint {digest}", retry_after_s=_RETRY_S)
        for node in sorted(nodes, key=lambda node: (not node.is_connected, node.node_id)):
            try:
                return await self._fetch_from(node, digest, name)
            except (aiohttp.ClientError, TimeoutError) as error:
                text = f"node {node.node_id} did not answer for {name} of {digest}: {type(error).__name__} {error}"
                failure = NodeLost(text, retry_after_s=_RETRY_S)
            except NotFound as error:
                failure = error
        raise failure

    async def close(self) -> None:
        await self._session.close()

    async def _fetch_from(self, node: NodeRecord, digest: Digest, name: str) -> bytes:
        url = f"{node.report.http_url}/checkpoints/{quote(digest)}/files/{quote(name)}"
        async with self._session.get(url) as answer:
            if answer.status == 404:
                raise NotFound(f"checkpoint {digest} on node {node.node_id} has no file {name}")
            answer.raise_for_status()
            data = await answer.content.read(MAX_FILE_BYTES + 1)
            while len(data) <= MAX_FILE_BYTES and (more := await answer.content.read(MAX_FILE_BYTES)):
                data += more
        if len(data) > MAX_FILE_BYTES:
            raise NotFound(f"{name} of checkpoint {digest} is larger than {MAX_FILE_BYTES} bytes; it is no text file")
        return data
