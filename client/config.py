"""Where the client finds the platform: flags first, then the environment, then the defaults."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nearline.protocol.errors import InvalidRequest
from nearline.protocol.options import url_complaint

DEFAULT_PORT = 8000
URL_VARIABLE = "NEARLINE_URL"
API_KEY_VARIABLE = "NEARLINE_API_KEY"
DATA_VARIABLE = "NEARLINE_DATA"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientConfig:
    """`max_retries` repeats only what the server marks as worth repeating, honouring its Retry-After. A server that
    sends nothing for `idle_timeout_s` is gone: a stream shows a sign of life every few seconds."""

    url: str
    api_key: str | None = None
    max_retries: int = 2
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 120.0


def client_config(url: str | None = None, api_key: str | None = None) -> ClientConfig:
    """Fill what the caller left open from NEARLINE_URL and NEARLINE_API_KEY. Raises InvalidRequest for no http URL."""
    chosen = url or os.environ.get(URL_VARIABLE) or f"http://127.0.0.1:{DEFAULT_PORT}"
    if (wrong := url_complaint(chosen, f" (--url or {URL_VARIABLE})")) is not None:
        raise InvalidRequest(wrong, param="url")
    return ClientConfig(url=chosen.rstrip("/"), api_key=api_key or os.environ.get(API_KEY_VARIABLE))


def default_data_dir() -> Path:
    """NEARLINE_DATA, or the user's data folder."""
    if os.environ.get(DATA_VARIABLE):
        return Path(os.environ[DATA_VARIABLE])
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "nearline"


def short_runtime_dir(data_dir: Path, name: str) -> Path:
    """A place for Unix sockets: the data directory, or a temporary one where its path exceeds the kernel's limit."""
    candidate = data_dir / name
    if len(str(candidate)) < 90:
        return candidate
    return Path(tempfile.mkdtemp(prefix="nearline-")) / name
