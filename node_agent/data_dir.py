"""The directory of one agent: whose it is, and that nobody else uses it."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from nearline.protocol import NodeId
from nearline.protocol.errors import InvalidRequest

LOCK_NAME = "agent.lock"
NODE_ID_NAME = "node_id"


@contextlib.contextmanager
def locked_data_dir(path: Path) -> Iterator[Path]:
    """Create the directory if need be and hold it until the end.

    Raises InvalidRequest when it cannot be written or another agent holds it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InvalidRequest(f"cannot write {path} ({error.strerror}); choose another --data-dir") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise InvalidRequest(
                f"another node agent (process {owner}) uses {path}; stop it or choose another --data-dir"
            ) from None
        os.ftruncate(fd, 0)
        with contextlib.suppress(OSError):  # a full disk: only whom to name is lost
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield path
    finally:
        os.close(fd)


def node_id(path: Path, wished: str | None) -> NodeId:
    """Give the node its lasting name: the wished one, else the one kept in the directory, else a new one."""
    kept = path / NODE_ID_NAME
    name = wished or (kept.read_text().strip() if kept.exists() else "")
    name = name or f"node-{uuid.uuid4().hex[:8]}"
    if not kept.exists() or kept.read_text().strip() != name:
        fresh = kept.with_suffix(".new")
        fresh.write_text(name + "\n")
        fresh.replace(kept)
    return NodeId(name)
