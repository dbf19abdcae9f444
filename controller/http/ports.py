"""What the front door needs of the rest of the controller: the shape of the runtime, as protocols.

Live, controller/runtime.py and its handles do this; tests drive the same routes with a scripted one.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container
from contextlib import AbstractContextManager
from typing import Any, Protocol

from nearline.protocol import (
    AdapterSpec,
    Bytes,
    CheckpointInfo,
    CheckpointKind,
    Digest,
    ModelId,
    ModelSpec,
    NodeId,
    Request,
    SequenceUpdate,
)
from nearline.protocol.frames import ImportFinished, ProfileFinished, ProfileProgress, TaskFinished, TaskProgress

Snapshot = dict[str, list[dict[str, Any]]]


class RequestStream(Protocol):
    """One request under way. Iterating yields its updates; the last one has finish_reason STOP or LENGTH.

    Raises the request's NearlineError from the iteration when it fails or is rejected late.
    """

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]: ...

    def cancel(self) -> None:
        """End the request wherever it is (held, queued, running). Idempotent; returns at once."""

    @property
    def timings(self) -> Any:
        """The waterfall so far: a dataclass of seconds, or None before anything happened."""


class FleetPort(Protocol):
    """The fleet as the front door sees it."""

    def open(self, request: Request) -> RequestStream:
        """Start a request. Raises NearlineError when it is rejected at once."""
        ...

    def add_model(self, spec: ModelSpec) -> None: ...

    def remove_model(self, model_id: ModelId) -> None: ...

    def add_adapter(self, spec: AdapterSpec) -> None: ...

    def remove_adapter(self, adapter_id: ModelId) -> None: ...

    def registry_loaded(self, own: Container[Digest]) -> None:
        """Say that every name there is was added; `own` are the checkpoints the registry had imported, ever."""

    def registering(self) -> AbstractContextManager[None]:
        """Keep all bytes from an import to the name it is for."""
        ...

    def import_checkpoint(
        self, kind: CheckpointKind, source: str, base_digest: Digest | None = None
    ) -> AsyncGenerator[TaskProgress | ImportFinished, None]:
        """Bring a checkpoint into a node's store. Closing the iterator early cancels the import."""
        ...

    def verify_checkpoint(self, digest: Digest) -> AsyncGenerator[tuple[NodeId, TaskProgress | TaskFinished], None]:
        """Check a checkpoint's bytes on every node that has it; the last item of each node is TaskFinished."""
        ...

    def copy_checkpoint(
        self, checkpoint: CheckpointInfo, node_id: NodeId | None
    ) -> AsyncGenerator[tuple[NodeId, TaskProgress | ImportFinished], None]:
        """Copy a checkpoint to another node from those that have it. The last item is ImportFinished."""
        ...

    def profile_checkpoint(
        self, digest: Digest, start: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[tuple[NodeId, ProfileProgress | ProfileFinished], None]:
        """Measure a checkpoint's steps on an instance of it, after `start` if none is ready; the last item is
        ProfileFinished."""
        ...

    async def evict_checkpoint(self, digest: Digest) -> Bytes:
        """Give a checkpoint's DRAM back; return the bytes freed."""
        ...

    async def fetch_file(self, digest: Digest, name: str) -> bytes: ...

    def snapshot(self) -> Snapshot:
        """The fleet now as rows of JSON's types: `nodes`, `instances`, `models`, `queues` (controller/snapshot.py)."""
        ...
