"""Files that hold a secret: written whole or not at all, and an empty one never passes for "no secret is needed"."""

import os
from pathlib import Path

from nearline.protocol.errors import InvalidRequest
from nearline.protocol.peers import TOKEN_VARIABLE


def write_secret(path: Path, text: str) -> None:
    """Write a file for its owner alone. After a crash or on a full disk the former one is there, or none."""
    incoming = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        incoming.replace(path)
    finally:
        incoming.unlink(missing_ok=True)


def read_secret(path: Path, flag: str) -> str:
    """Read the one line of a file that `flag` names. Raises InvalidRequest for a file without one or with several."""
    text = read_text(path, flag).strip()
    if not text:
        raise InvalidRequest(f"{flag} {path} is empty, which would let everybody in; write its one line, or delete it")
    if len(text.splitlines()) > 1:
        raise InvalidRequest(f"{flag} {path} must hold one line, not {len(text.splitlines())}")
    return text


def read_text(path: Path, flag: str) -> str:
    """Read a file that `flag` names. Raises InvalidRequest."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "it is not text"
        raise InvalidRequest(f"cannot read {flag} {path}: {why}") from None


def cluster_token(path: Path | None, flag: str) -> str | None:
    """The token of a file, else of the environment; None: nodes and controller trust everybody who reaches them."""
    if path is not None:
        return read_secret(path, flag)
    token = os.environ.get(TOKEN_VARIABLE)
    if token is not None and not token.strip():
        raise InvalidRequest(
            f"{TOKEN_VARIABLE} is empty, which would let everybody in; set it to the token, or unset it"
        )
    return token and token.strip()
