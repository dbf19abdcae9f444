"""Tokens a tenant may use per minute, over all front doors together, counted before they are spent.

A request reserves its prompt and all the tokens it may generate, in one step by the server's own clock; when it has
ended the reservation shrinks to what was used. So a burst cannot pass before anything has been counted. The minute
slides. A request larger than the whole limit goes when nothing else was used in the last minute.
"""

import asyncio
import math
import uuid
from dataclasses import dataclass, field

import structlog

from nearline.controller.durable.redis_state import State
from nearline.protocol import TenantId
from nearline.protocol.errors import NearlineError, RateLimited, StateUnavailable, StorageFull

log = structlog.get_logger(__name__)

# KEYS: entries `id:tokens` by time, their sum. ARGV: id, tokens, limit. Answers 0, or ms until there may be room.
RESERVE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local function tokens(entry) return tonumber(string.match(entry, ':(%d+)$')) end
for _, entry in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - 60000)) do
  redis.call('DECRBY', KEYS[2], tokens(entry))
  redis.call('ZREM', KEYS[1], entry)
end
if redis.call('ZCARD', KEYS[1]) == 0 then redis.call('SET', KEYS[2], 0) end
local used, wanted, limit = tonumber(redis.call('GET', KEYS[2]) or '0'), tonumber(ARGV[2]), tonumber(ARGV[3])
if used > 0 and used + wanted > limit then
  local excess = math.min(used, used + wanted - limit)
  local entries = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    excess = excess - tokens(entries[i])
    if excess <= 0 then return math.max(1, entries[i + 1] + 60000 - now) end
  end
  return 60000
end
redis.call('ZADD', KEYS[1], now, ARGV[1] .. ':' .. ARGV[2])
redis.call('INCRBY', KEYS[2], wanted)
redis.call('PEXPIRE', KEYS[1], 120000)
redis.call('PEXPIRE', KEYS[2], 120000)
return 0
"""
# ARGV: id, tokens reserved, tokens used. An entry that has left the minute stays gone.
SETTLE = """
local at = redis.call('ZSCORE', KEYS[1], ARGV[1] .. ':' .. ARGV[2])
if not at then return 0 end
redis.call('ZREM', KEYS[1], ARGV[1] .. ':' .. ARGV[2])
redis.call('ZADD', KEYS[1], at, ARGV[1] .. ':' .. ARGV[3])
return redis.call('INCRBY', KEYS[2], ARGV[3] - ARGV[2])
"""


@dataclass(slots=True)
class Reservation:
    """Tokens set aside for one request. `settle` once it has ended; None of it waits."""

    meter: "TokenMeter | None" = None
    keys: tuple[str, ...] = ()
    entry: str = ""
    num_reserved: int = 0

    def settle(self, num_used: int) -> None:
        """Give back what was not used. Idempotent."""
        meter, self.meter = self.meter, None
        if meter is not None and num_used != self.num_reserved:
            meter.settle_soon(self.keys, self.entry, self.num_reserved, num_used)


@dataclass(eq=False, slots=True)
class TokenMeter:
    """Reserves and settles. Owns: the settlements under way."""

    _settling: set[asyncio.Task[None]] = field(default_factory=set)
    _state: State | None = None

    async def reserve(self, state: State, tenant: TenantId, limit: int, num_tokens: int) -> Reservation:
        """Set tokens aside. Raises RateLimited with the time to come back. While Redis is away or full all go."""
        keys = (state.key("limit", "tokens", tenant), state.key("limit", "token_sum", tenant))
        entry = uuid.uuid4().hex
        try:
            wait_ms = int(await state.run(RESERVE, keys, [entry, num_tokens, limit]))
        except (StateUnavailable, StorageFull):
            log.warning("token limits are not held: the state store is away or full", tenant=tenant)
            return Reservation()
        if wait_ms:
            wait_s = max(1, math.ceil(wait_ms / 1000))
            text = f"tenant {tenant!r} may use {limit} tokens a minute and this request may take {num_tokens}"
            raise RateLimited(f"{text}; try again in {wait_s} s or set a smaller max_tokens", retry_after_s=wait_s)
        self._state = state
        return Reservation(self, keys, entry, num_tokens)

    def settle_soon(self, keys: tuple[str, ...], entry: str, num_reserved: int, num_used: int) -> None:
        task = asyncio.create_task(self._settle(keys, [entry, num_reserved, num_used]), name="settle tokens")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def settled(self) -> None:
        """Wait for the settlements under way, and for those that begin meanwhile; the state must be open yet."""
        while self._settling:
            await asyncio.gather(*self._settling)

    async def _settle(self, keys: tuple[str, ...], args: list[str | int | float]) -> None:
        try:
            assert self._state is not None
            await self._state.run(SETTLE, keys, args)
        except NearlineError:
            log.warning("a request counts with all the tokens it might have used, for a minute")
