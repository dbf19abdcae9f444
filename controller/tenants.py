"""Who is calling: API keys and the tenant each stands for."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nearline.protocol import TenantId
from nearline.protocol.errors import Forbidden, Unauthorized
from nearline.protocol.secret_files import read_secret, read_text

DEFAULT_TENANT = TenantId("default")


@dataclass(frozen=True, slots=True)
class Tenants:
    """Digests of the keys and their tenants. Without any key everybody is the default tenant.

    With an `admin_digest` only its key may administer; without one every key may.
    """

    by_digest: tuple[tuple[bytes, TenantId], ...] = ()
    admin_digest: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, pairs: Iterable[str], admin_key: str | None = None) -> "Tenants":
        """Build from `NAME=KEY` pairs. Raises ValueError for a pair without a name or a key."""
        found = []
        for pair in pairs:
            name, _, key = pair.partition("=")
            if not name or not key:
                raise ValueError("an API key is given as NAME=KEY")
            found.append((_digest(key), TenantId(name)))
        return cls(tuple(found), _digest(admin_key) if admin_key else None)

    @property
    def is_open(self) -> bool:
        """Nobody has to show a key."""
        return not self.by_digest

    def authenticate(self, authorization: str | None) -> TenantId:
        """Name the tenant of an Authorization header. Raises Unauthorized."""
        if self.is_open:
            return DEFAULT_TENANT
        digest = _bearer_digest(authorization)
        found = None
        for known, tenant in self.by_digest:  # every key is compared, so time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None and self.is_admin(digest):
            return DEFAULT_TENANT
        if found is None:
            raise Unauthorized("this API key is not known (`Authorization: Bearer <key>`)")
        return found

    def check_admin(self, authorization: str | None) -> None:
        """Raises Unauthorized or Forbidden unless this caller may administer."""
        self.authenticate(authorization) if self.by_digest else None
        if self.admin_digest is not None and not (self.by_digest or authorization):
            raise Unauthorized("this needs the admin key (`Authorization: Bearer <key>`)")
        if self.admin_digest is not None and not self.is_admin(_bearer_digest(authorization)):
            raise Forbidden("this needs the admin key")

    def is_admin(self, digest: bytes) -> bool:
        return self.admin_digest is not None and hmac.compare_digest(self.admin_digest, digest)


def read_key_file(path: Path) -> list[str]:
    """Read `NAME=KEY` lines; empty lines and lines that begin with # are skipped. Raises ValueError for another line,
    and for a file without any: it would open the door to everybody."""
    lines = [line.strip() for line in read_text(path, "--api-key-file").splitlines()]
    pairs = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not pairs:
        raise ValueError(f"--api-key-file {path} holds no key; write one NAME=KEY per line")
    for number, line in pairs:
        name, _, key = line.partition("=")
        if not name or not key:
            raise ValueError(f"--api-key-file {path}, line {number}: it is not written as NAME=KEY")
    return [line for _, line in pairs]


def read_admin_key(path: Path) -> str:
    """Read the only key that may administer. Raises InvalidRequest for a file without one, and for one with several."""
    return read_secret(path, "--admin-key-file")


def _bearer_digest(authorization: str | None) -> bytes:
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized("an API key is needed (`Authorization: Bearer <key>`)")
    return _digest(key.strip())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
