"""The connection to Redis or Valkey: one place for its address, key prefix, time limits and failures."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from nearline.protocol.errors import StateUnavailable, StorageFull

DEFAULT_PREFIX = "nearline:"
ANSWER_LIMIT_S = 10.0
"""Longer than any blocking read we do, so that only a dead server runs into it."""

RETRY_AFTER_S = 2.0
MAX_CONNECTIONS = 64
FLUSH_LOOK_S = 0.01
NUM_FLUSH_LOOKS = 250
"""A server may hold back what it appends while the disk syncs, for 2 s at most."""

DISK_FULL = (
    "the disk of the state store (Redis) is full or broken: it keeps what it has but takes no writes; free some space,"
    " nothing needs a restart"
)
MEMORY_FULL = (
    "the memory of the state store (Redis) is full: it keeps what it has but takes no writes; raise its maxmemory,"
    " nothing needs a restart"
)


class State:
    """A Redis client that speaks our errors. Owns: the connection pool.

    Every key begins with `prefix`, so that two deployments can share one server.
    """

    def __init__(self, url: str, prefix: str = DEFAULT_PREFIX) -> None:
        self.prefix = prefix
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=ANSWER_LIMIT_S,
            decode_responses=True,
            socket_timeout=None,  # the client's own waits lose cancellations on Python 3.11; state_errors has the limit
            socket_connect_timeout=3.0,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
        )
        self.redis: Any = Redis.from_pool(pool)  # Any: its annotations know bytes only, we decode

    def key(self, *parts: str) -> str:
        """Name a key of this deployment."""
        return self.prefix + ":".join(parts)

    async def ping(self) -> None:
        """Raises StateUnavailable when the server does not answer."""
        async with state_errors():
            await self.redis.ping()

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float]) -> Any:
        """Run a Lua script atomically. Raises StateUnavailable, StorageFull."""
        async with state_errors():
            return await self.redis.register_script(script)(keys=list(keys), args=list(args))

    async def confirm(self) -> None:
        """Make sure that what was written before will survive; a server without an append-only file promises nothing.

        A server answers a write before it learns that its disk takes no more; it knows at the next command.
        Raises StateUnavailable.
        """
        async with state_errors():
            for _ in range(NUM_FLUSH_LOOKS):
                known = await self.redis.info("persistence")
                if not known.get("aof_enabled"):
                    return
                if known.get("aof_last_write_status") != "ok":
                    raise StateUnavailable(DISK_FULL, retry_after_s=RETRY_AFTER_S)
                if not int(known.get("aof_buffer_length", 0)):
                    return
                await asyncio.sleep(FLUSH_LOOK_S)

    async def close(self) -> None:
        await self.redis.aclose()


@asynccontextmanager
async def state_errors() -> AsyncIterator[None]:
    """Bound the time of a command, and turn failures of the server and of the way to it into our own.

    Raises StateUnavailable, or StorageFull when the server is out of memory.
    """
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            yield
    except (RedisError, OSError, TimeoutError) as error:
        if isinstance(error, OutOfMemoryError):
            raise StorageFull(MEMORY_FULL) from error
        if "MISCONF" in str(error):
            raise StateUnavailable(DISK_FULL, retry_after_s=RETRY_AFTER_S) from error
        text = f"the state store (Redis) does not answer: {error or type(error).__name__}; try again"
        raise StateUnavailable(text, retry_after_s=RETRY_AFTER_S) from error
