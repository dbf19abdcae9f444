"""What the front door needs of the rest of the controller: the shape of the runtime, as protocols.

The live implementation is controller/runtime.py; tests drive the same routes with a scripted one.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from nearline.protocol import (
    AdapterSpec,
    CheckpointInfo,
    CheckpointKind,
    Digest,
    ModelId,
    ModelSpec,
    Request,
    SequenceUpdate,
)
from nearline.protocol.frames import ImportFinished, ImportProgress


class RequestHandle(Protocol):
    """One request under way. Iterating yields its updates; the last one has a finish_reason.

    Raises the request's NearlineError from the iteration when it fails or is rejected late.
    """

    def __aiter__(self) -> AsyncIterator[SequenceUpdate]: ...

    def cancel(self) -> None:
        """End the request wherever it is (held, queued, running). Idempotent; returns at once."""

    @property
    def timings(self) -> Any:
        """The waterfall so far: a dataclass of seconds, or None before anything happened."""


class Runtime(Protocol):
    """The fleet as the front door sees it."""

    def open(self, request: Request) -> RequestHandle:
        """Start a request. Raises NearlineError when it is rejected at once."""
        ...

    def add_model(self, spec: ModelSpec) -> None: ...

    def remove_model(self, model_id: ModelId) -> None: ...

    def add_adapter(self, spec: AdapterSpec) -> None: ...

    def remove_adapter(self, adapter_id: ModelId) -> None: ...

    def import_checkpoint(
        self, kind: CheckpointKind, source: str, base_digest: Digest | None = None
    ) -> AsyncIterator[ImportProgress | ImportFinished]:
        """Bring a checkpoint into a node's store. Closing the iterator early cancels the import."""
        ...

    async def fetch_file(self, digest: Digest, name: str) -> bytes: ...

    def snapshot(self) -> Any:
        """The fleet now: nodes, instances, queues, models."""


def checkpoint_of(update: ImportProgress | ImportFinished) -> CheckpointInfo | None:
    """Name the checkpoint when this update is the import's last."""
    return update.checkpoint if isinstance(update, ImportFinished) else None
