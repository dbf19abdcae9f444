"""Limits of tenants on a real Valkey: they hold over several front doors, tell when to come back, and end."""

import asyncio

import pytest

from nearline.controller.durable.limits import Limit, Limits
from nearline.controller.durable.redis_state import State
from nearline.protocol import SloClass, TenantId
from nearline.protocol.errors import RateLimited
from tests.controller.conftest import Valkey

ACME, OTHER = TenantId("acme"), TenantId("other")


async def one(limits: Limits, state: State, tenant: TenantId = ACME) -> str:
    try:
        async with limits.admitted(state, tenant):
            return "ok"
    except RateLimited as error:
        return error.code if 1 <= (error.retry_after_s or 0) <= 60 else f"come back in {error.retry_after_s}"


async def test_the_eleventh_of_ten_a_minute_is_refused_whichever_front_door_it_comes_through(
    valkey: Valkey, prefix: str
) -> None:
    doors = [State(valkey.url, prefix), State(valkey.url, prefix)]
    limits = Limits.of(["acme=10:0"])
    answers = await asyncio.gather(*(one(limits, doors[n % 2]) for n in range(30)))
    assert sorted(answers) == ["ok"] * 10 + ["rate_limit_exceeded"] * 20
    assert await one(limits, doors[0], OTHER) == "ok"
    for door in doors:
        await door.close()


async def test_no_more_run_at_once_than_allowed_and_an_end_makes_room(state: State) -> None:
    limits = Limits.of(["acme=0:2"])
    async with limits.admitted(state, ACME):
        async with limits.admitted(state, ACME):
            assert await one(limits, state) == "rate_limit_exceeded"
        assert await one(limits, state) == "ok"
    with pytest.raises(ZeroDivisionError):
        async with limits.admitted(state, ACME):
            raise ZeroDivisionError
    async with limits.admitted(state, ACME), limits.admitted(state, ACME):
        pass


async def test_while_the_store_is_away_requests_go_through(own_valkey: Valkey, prefix: str) -> None:
    state = State(own_valkey.url, prefix)
    limits = Limits.of(["acme=1:1"])
    assert await one(limits, state) == "ok"
    own_valkey.stop()
    assert await one(limits, state) == "ok"
    await state.close()


@pytest.mark.parametrize("pair", ["acme", "acme=", "acme=x", "acme=1:x", "=1", "acme=-1", "acme=1:2:3:4"])
def test_a_limit_that_is_none_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match="NAME=PER_MINUTE:AT_ONCE:TOKENS"):
        Limits.of([pair])


@pytest.mark.parametrize("cap", ["acme=soon", "=batch-1m", "acme"])
def test_a_cap_that_is_none_is_refused(cap: str) -> None:
    with pytest.raises(ValueError, match="NAME=CLASS"):
        Limits.of([], [cap])


def test_limits_and_caps_of_one_tenant_are_kept_together() -> None:
    limits = Limits.of(["acme=10:2:5000", "other=1"], ["acme=batch-1m"])
    assert limits.by_tenant[ACME] == Limit(10, 2, 5000, SloClass.BATCH_1M)
    assert (limits.slo_cap(ACME), limits.slo_cap(OTHER), limits.slo_cap(TenantId("x"))) == ("batch-1m", None, None)


async def test_a_burst_cannot_pass_before_its_tokens_are_counted(valkey: Valkey, prefix: str) -> None:
    """Thirty requests of up to 300 tokens at once through two doors: three fit into 1,000 a minute."""
    doors = [State(valkey.url, prefix), State(valkey.url, prefix)]
    limits = Limits.of(["acme=0:0:1000"])

    async def reserve(n: int) -> bool:
        try:
            await limits.reserve(doors[n % 2], ACME, 300)
        except RateLimited as error:
            return not 1 <= (error.retry_after_s or 0) <= 60
        return True

    assert sum(await asyncio.gather(*(reserve(n) for n in range(30)))) == 3
    for door in doors:
        await door.close()


async def test_what_was_not_used_is_given_back_once_and_others_are_not_held(state: State) -> None:
    limits = Limits.of(["acme=0:0:1000"])
    big = await limits.reserve(state, ACME, 900)
    with pytest.raises(RateLimited, match="smaller max_tokens"):
        await limits.reserve(state, ACME, 200)
    for _ in range(2):
        big.settle(100)
        await limits.meter.settled()
    await limits.reserve(state, ACME, 900)
    with pytest.raises(RateLimited):
        await limits.reserve(state, ACME, 1)
    (await limits.reserve(state, OTHER, 10**9)).settle(5)


async def test_a_request_larger_than_the_limit_goes_alone(state: State) -> None:
    limits = Limits.of(["acme=0:0:100"])
    await limits.reserve(state, ACME, 5000)
    with pytest.raises(RateLimited):
        await limits.reserve(state, ACME, 1)


async def test_a_door_that_closes_waits_for_what_is_being_given_back(state: State, valkey: Valkey, prefix: str) -> None:
    closing, limits = State(valkey.url, prefix), Limits.of(["acme=0:0:1000"])
    for _ in range(5):
        (await limits.reserve(closing, ACME, 200)).settle(0)
    await limits.meter.settled()
    await closing.close()
    await limits.reserve(state, ACME, 1000)
