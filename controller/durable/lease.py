"""The leader lease: at most one controller owns the fleet, and a number that only grows tells old owners from new."""

import asyncio
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import structlog

from nearline.controller.durable.redis_state import State, state_errors
from nearline.protocol.errors import NearlineError, StateUnavailable, StorageFull

log = structlog.get_logger(__name__)

ACQUIRE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return token
"""
# After an outage the lease may have run out while nobody else took it: the fencing number then is still ours. A server
# whose memory is full takes PEXPIRE, not SET.
RENEW = """
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
if not owner and redis.call('GET', KEYS[2]) == ARGV[3] then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
return 0
"""
TAKE_OVER = """
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return 0 end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return token
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class LeaderLease:
    """This process's claim to be the controller. `token` is its fencing token, 0 while it is not the leader.

    `deployment` names the state store once the lease was acquired: tokens count up within one deployment only.
    """

    def __init__(self, state: State, ttl_s: float = 6.0) -> None:
        self._state = state
        self._ttl_s = ttl_s
        self._owner = _identity(os.getpid())
        self.token = 0
        self.deployment = ""

    def _keys(self) -> list[str]:
        return [self._state.key("leader"), self._state.key("fence")]

    async def acquire(self) -> int:
        """Wait until the lease is free and Redis takes writes, and take it; return the fencing token.

        To fall over instead of waiting out a full disk would only begin the same wait anew.
        """
        told = ""
        while True:
            reason = "another controller leads on this Redis; waiting until its lease is free"
            try:
                if token := await self._try():
                    self.deployment = await self._name()
                    break
            except (StateUnavailable, StorageFull) as error:
                reason = error.message
            if reason != told:
                told = reason
                log.warning("standby", reason=reason)
            await asyncio.sleep(self._ttl_s / 6)
        self.token = token
        log.info("leader_lease_taken", fencing_token=token)
        return token

    async def _try(self) -> int:
        ttl_ms = int(self._ttl_s * 1000)
        token = int(await self._state.run(ACQUIRE, self._keys(), [self._owner, ttl_ms]))
        if token:
            return token
        async with state_errors():
            owner = await self._state.redis.get(self._keys()[0])
        if owner is None or not _is_dead(owner):
            return 0
        return int(await self._state.run(TAKE_OVER, self._keys(), [self._owner, ttl_ms, owner]))

    async def _name(self) -> str:
        async with state_errors():
            key = self._state.key("deployment")
            await self._state.redis.set(key, uuid.uuid4().hex, nx=True)
            return str(await self._state.redis.get(key))

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


def _identity(pid: int) -> str:
    """Name a process of this machine for all time: a pid alone would be used again."""
    return f"{_machine()}/{pid}/{_started_at(pid)}/{uuid.uuid4().hex}"


def _is_dead(owner: str) -> bool:
    """Whether an owner was a process of this very machine and has ended: its lease need not be waited for."""
    machine, pid, started_at, _ = owner.rsplit("/", 3)
    return machine == _machine() and _started_at(int(pid)) != started_at


def _machine() -> str:
    """This boot of this kernel, and the pid namespace in which pids mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return uuid.uuid4().hex


def _started_at(pid: int) -> str:
    """Ticks since boot at which a process started; empty when it is gone or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
