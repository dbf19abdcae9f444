"""The leader lease: at most one controller owns the fleet, and a number that only grows tells old owners from new."""

import asyncio
import uuid
from collections.abc import Callable

import structlog

from nearline.controller.redis_state import State
from nearline.protocol.errors import NearlineError

log = structlog.get_logger(__name__)

ACQUIRE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return token
"""
# After an outage the lease may have run out while nobody else took it: the fencing number then is still ours.
RENEW = """
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] or (not owner and redis.call('GET', KEYS[2]) == ARGV[3]) then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
return 0
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class LeaderLease:
    """This process's claim to be the controller. `token` is its fencing token, 0 while it is not the leader."""

    def __init__(self, state: State, ttl_s: float = 6.0) -> None:
        self._state = state
        self._ttl_s = ttl_s
        self._owner = uuid.uuid4().hex
        self.token = 0

    def _keys(self) -> list[str]:
        return [self._state.key("leader"), self._state.key("fence")]

    async def acquire(self) -> int:
        """Wait until the lease is free and take it; return the fencing token. Raises StateUnavailable."""
        is_waiting = False
        while True:
            token = int(await self._state.run(ACQUIRE, self._keys(), [self._owner, int(self._ttl_s * 1000)]))
            if token:
                self.token = token
                log.info("leader_lease_taken", fencing_token=token)
                return token
            if not is_waiting:
                is_waiting = True
                log.warning("standby", reason="another controller leads on this Redis; waiting until its lease is free")
            await asyncio.sleep(self._ttl_s / 6)

    async def keep(self, on_lost: Callable[[], None]) -> None:
        """Renew for ever. Calls `on_lost` once when another controller has taken over; an outage alone is no loss."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                if not await self._renew():
                    log.error("leader_lease_lost", fencing_token=self.token)
                    self.token = 0
                    on_lost()
                    return
            except NearlineError as error:
                log.warning("leader_lease_not_renewed", error=error.message)

    async def _renew(self) -> bool:
        ttl_ms = int(self._ttl_s * 1000)
        return bool(await self._state.run(RENEW, self._keys(), [self._owner, ttl_ms, self.token]))

    async def release(self) -> None:
        """Let a standby take over at once."""
        if self.token:
            self.token = 0
            await self._state.run(RELEASE, self._keys(), [self._owner])
