"""Limits of tenants that hold over all front doors together: requests and tokens per minute, requests at once.

One script in Redis looks and counts in one step, by the server's own clock, so replicas and skewed clocks change
nothing. The minute slides: it is exact, not a window that two bursts can share. While Redis is away or full nobody is
held to a limit: a guard that fails must not stop everybody.
"""

import math
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import structlog

from nearline.controller.durable.redis_state import State
from nearline.controller.durable.token_limits import Reservation, TokenMeter
from nearline.protocol import SloClass, TenantId
from nearline.protocol.errors import RateLimited, StateUnavailable, StorageFull

LEASE_S = 900
"""A request that began this long ago no longer counts as running: its front door may have died."""
_MINUTE_MS = 60_000
log = structlog.get_logger(__name__)

# KEYS: requests of the last minute, running requests. ARGV: id, per minute, at once (0: no limit), lease in ms.
# Answers {1, 0}, or {0, ms until one more may come}, or {-1, 0} when too many run at once.
ENTER = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 60000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local rate, many = tonumber(ARGV[2]), tonumber(ARGV[3])
if many > 0 and redis.call('ZCARD', KEYS[2]) >= many then return {-1, 0} end
if rate > 0 and redis.call('ZCARD', KEYS[1]) >= rate then
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return {0, first[2] + 60000 - now}
end
if rate > 0 then
  redis.call('ZADD', KEYS[1], now, ARGV[1])
  redis.call('PEXPIRE', KEYS[1], 60000)
end
if many > 0 then
  redis.call('ZADD', KEYS[2], now + ARGV[4], ARGV[1])
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
end
return {1, 0}
"""
LEAVE = "return redis.call('ZREM', KEYS[1], ARGV[1])"


@dataclass(frozen=True, slots=True)
class Limit:
    """0 means no limit. `slo_cap` is the strictest class its requests are promised, whatever they ask for."""

    per_minute: int = 0
    at_once: int = 0
    tokens_per_minute: int = 0
    slo_cap: SloClass | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limited tenants. All others never touch Redis. Owns: the meter of their tokens."""

    by_tenant: Mapping[TenantId, Limit] = field(default_factory=dict)
    meter: TokenMeter = field(default_factory=TokenMeter)

    @classmethod
    def of(cls, pairs: Iterable[str], caps: Iterable[str] = ()) -> "Limits":
        """Build from `NAME=PER_MINUTE:AT_ONCE:TOKENS_PER_MINUTE`, the last two may be left out, and `NAME=CLASS`.

        Raises ValueError for anything else.
        """
        found: dict[TenantId, Limit] = {}
        for pair in pairs:
            name, _, text = pair.rpartition("=")
            numbers = text.split(":")
            if not name or len(numbers) > 3 or not all(number.isdecimal() for number in numbers):
                raise ValueError(f"a limit is given as NAME=PER_MINUTE:AT_ONCE:TOKENS (0: none), not {pair!r}")
            found[TenantId(name)] = _limit([int(number) for number in numbers])
        for pair in caps:
            name, _, text = pair.rpartition("=")
            if not name or text not in list(SloClass):
                raise ValueError(f"a cap is given as NAME=CLASS with one of {', '.join(SloClass)}, not {pair!r}")
            found[TenantId(name)] = replace(found.get(TenantId(name), Limit()), slo_cap=SloClass(text))
        return cls(found)

    def slo_cap(self, tenant: TenantId) -> SloClass | None:
        limit = self.by_tenant.get(tenant)
        return None if limit is None else limit.slo_cap

    async def reserve(self, state: State, tenant: TenantId, num_tokens: int) -> Reservation:
        """Set aside the tokens a request may use. Raises RateLimited with the time to come back."""
        limit = self.by_tenant.get(tenant)
        if limit is None or not limit.tokens_per_minute:
            return Reservation()
        return await self.meter.reserve(state, tenant, limit.tokens_per_minute, num_tokens)

    @asynccontextmanager
    async def admitted(self, state: State, tenant: TenantId) -> AsyncIterator[None]:
        """Count one request from here to the end of the block. Raises RateLimited with the time to come back."""
        limit = self.by_tenant.get(tenant)
        if limit is None or not (limit.per_minute or limit.at_once):
            yield
            return
        entry = uuid.uuid4().hex
        keys = [state.key("limit", "minute", tenant), state.key("limit", "running", tenant)]
        try:
            args: list[str | int | float] = [entry, limit.per_minute, limit.at_once, LEASE_S * 1000]
            verdict, wait_ms = await state.run(ENTER, keys, args)
        except (StateUnavailable, StorageFull):
            log.warning("limits are not held: the state store is away or full", tenant=tenant)
            yield
            return
        if verdict != 1:
            raise _refusal(tenant, limit, verdict, wait_ms)
        try:
            yield
        finally:
            if limit.at_once:
                await self._leave(state, keys[1], entry)

    async def _leave(self, state: State, key: str, entry: str) -> None:
        try:
            await state.run(LEAVE, [key], [entry])
        except (StateUnavailable, StorageFull):
            log.warning("a finished request counts as running until its lease ends", lease_s=LEASE_S)


def _limit(numbers: list[int]) -> Limit:
    per_minute, at_once, tokens_per_minute = [*numbers, 0, 0][:3]
    return Limit(per_minute, at_once, tokens_per_minute)


def _refusal(tenant: TenantId, limit: Limit, verdict: int, wait_ms: int) -> RateLimited:
    if verdict < 0:
        text = f"tenant {tenant!r} may run {limit.at_once} requests at once; wait for one of them to end"
        return RateLimited(text, retry_after_s=1.0)
    wait_s = math.ceil(min(max(wait_ms, 0), _MINUTE_MS) / 1000)
    text = f"tenant {tenant!r} may send {limit.per_minute} requests a minute; try again in {wait_s} s"
    return RateLimited(text, retry_after_s=float(max(1, wait_s)))
