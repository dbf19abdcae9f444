"""Bytes that cross the controller's path: imports it asks nodes for, and small text files it fetches from them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp
import structlog

from nearline.controller.node_link import NodeLinks
from nearline.controller.state import Fleet, NodeRecord
from nearline.protocol import CheckpointKind, Digest, NodeId, TaskId
from nearline.protocol.errors import ErrorInfo, NearlineError, NodeLost, NotFound
from nearline.protocol.frames import CancelImport, ImportCheckpoint, ImportFailed, ImportFinished, ImportProgress

_FETCH_S = 15.0
_RETRY_S = 5.0
MAX_FILE_BYTES = 64 << 20
ImportFrame = ImportProgress | ImportFinished | ImportFailed
log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Import:
    node_id: NodeId
    frames: asyncio.Queue[ImportFrame] = field(default_factory=asyncio.Queue)


class Imports:
    """Imports under way, each on one node. A caller that goes away cancels its import."""

    def __init__(self, fleet: Fleet, links: NodeLinks, next_id: Callable[[str], str]) -> None:
        self._fleet = fleet
        self._links = links
        self._next_id = next_id
        self._running: dict[TaskId, _Import] = {}

    async def run(
        self, kind: CheckpointKind, source: str, base_digest: Digest | None
    ) -> AsyncGenerator[ImportProgress | ImportFinished, None]:
        """Import on the best node and yield progress, then ImportFinished. Raises the import's NearlineError."""
        node = self._choose_node(base_digest)
        task_id = TaskId(self._next_id("import"))
        task = self._running[task_id] = _Import(node.node_id)
        is_over = False
        try:
            self._links.send(node.node_id, ImportCheckpoint(task_id, kind, source, base_digest))
            while not is_over:
                frame = await task.frames.get()
                is_over = not isinstance(frame, ImportProgress)
                if isinstance(frame, ImportFailed):
                    raise frame.error.exception()
                yield frame
        finally:
            del self._running[task_id]
            if not is_over:
                self._links.send(node.node_id, CancelImport(task_id))

    def received(self, node_id: NodeId, frame: ImportFrame) -> None:
        """Pass a node's word on to whoever waits for it; an import nobody waits for is cancelled."""
        task = self._running.get(frame.task_id)
        if task is not None:
            task.frames.put_nowait(frame)
        elif isinstance(frame, ImportProgress):
            self._links.send(node_id, CancelImport(frame.task_id))

    def node_lost(self, node_id: NodeId) -> None:
        """Fail the imports of a node whose link broke."""
        error = NodeLost(f"node {node_id} was lost during the import; try again", retry_after_s=_RETRY_S)
        for task_id, task in self._running.items():
            if task.node_id == node_id:
                task.frames.put_nowait(ImportFailed(task_id, ErrorInfo.of(error)))

    def _choose_node(self, base_digest: Digest | None) -> NodeRecord:
        """The connected node with most disk left; for an adapter, one that holds its base."""
        nodes = [node for node in self._fleet.nodes.values() if node.is_connected]
        if base_digest is not None:
            nodes = [node for node in nodes if node.holds(base_digest)] or nodes
        if not nodes:
            raise NodeLost("no node is connected; start one with `nearline node`", retry_after_s=_RETRY_S)
        return min(nodes, key=lambda node: (-node.report.ssd_free_bytes, node.node_id))


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
