"""The connection to Redis or Valkey: one place for its address, key prefix, time limits and failures."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from nearline.protocol.errors import StateUnavailable, StorageFull

DEFAULT_PREFIX = "nearline:"
ANSWER_LIMIT_S = 10.0
"""Longer than any blocking read we do, so that only a dead server runs into it."""

RETRY_AFTER_S = 2.0
MAX_CONNECTIONS = 64


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
        """Run a Lua script atomically. Raises StateUnavailable."""
        async with state_errors():
            return await self.redis.register_script(script)(keys=list(keys), args=list(args))

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
        if str(error).startswith("OOM"):
            raise StorageFull(f"Redis is out of memory: {error}; raise its maxmemory") from error
        text = f"the state store (Redis) does not answer: {error or type(error).__name__}; try again"
        raise StateUnavailable(text, retry_after_s=RETRY_AFTER_S) from error
