"""A tenant's limit as a client meets it: 429 with Retry-After, health and looking stay free."""

from typing import Any

from nearline.controller.durable.limits import Limits
from nearline.protocol.errors import InstanceFailed, Overloaded
from tests.controller.http.conftest import serve

PATH = "/v1/functions/tiny/invocations"


async def test_one_request_too_many_is_429_with_retry_after_and_health_stays_green(make_door: Any) -> None:
    door, runtime = await make_door(limits=Limits.of(["default=2:0"]))
    async for front in serve(door, runtime):
        statuses = [(await front.post(PATH, {"prompt": "Hi"}))[0] for _ in range(2)]
        status, answer, headers = await front.post(PATH, {"prompt": "Hi"})
        assert (statuses, status, answer["error"]["code"]) == ([200, 200], 429, "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 60
        async with front.session.get(f"{front.url}/health/live") as response:
            assert response.status == 200
        async with front.session.get(f"{front.url}/v1/models") as response:
            assert response.status == 200


async def test_tokens_a_minute_are_reserved_before_they_are_spent_and_settled_after(make_door: Any) -> None:
    limits = Limits.of(["default=0:0:100"])
    door, runtime = await make_door(limits=limits)
    async for front in serve(door, runtime):
        body, num_ok, status = {"prompt": "Hi", "max_tokens": 60}, 0, 200
        while status == 200 and num_ok < 30:
            status, answer, headers = await front.post(PATH, body)
            await limits.meter.settled()
            num_ok += status == 200
        assert num_ok >= 2, "what the first did not use is there for the second"
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 60
        assert len(runtime.handles) == num_ok, "the refused one never reached the fleet"


async def test_a_refused_batch_of_embeddings_gives_its_tokens_back(make_door: Any) -> None:
    """90 of 100 tokens a minute, as often as the fleet refuses them; then once, and the minute is full."""
    limits = Limits.of(["default=0:0:100"])
    door, runtime = await make_door(limits=limits)
    async for front in serve(door, runtime):
        body = {"model": "tiny", "input": [[5] * 30] * 3}
        runtime.refusal = Overloaded("too many wait")
        for _ in range(3):
            status, answer, _ = await front.post("/v1/embeddings", body)
            await limits.meter.settled()
            assert (status, answer["error"]["code"]) == (429, "overloaded")
        runtime.refusal = None
        assert (await front.post("/v1/embeddings", body))[0] == 200
        await limits.meter.settled()
        status, answer, _ = await front.post("/v1/embeddings", body)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_a_batch_that_breaks_off_counts_what_it_had_begun(make_door: Any) -> None:
    """64 of 200 inputs run at once: 1,920 of the 6,000 tokens they reserved were begun."""
    limits = Limits.of(["default=0:0:6000"])
    door, runtime = await make_door(limits=limits)
    async for front in serve(door, runtime):
        runtime.break_at, runtime.step_s = (0, InstanceFailed("the instance is gone")), 0.02
        assert (await front.post("/v1/embeddings", {"model": "tiny", "input": [[5] * 30] * 200}))[0] == 500
        num_begun = 30 * len(runtime.handles)
        await limits.meter.settled()
        runtime.break_at = None
        for num_inputs, expected in (((6000 - num_begun) // 30 + 1, 429), ((6000 - num_begun) // 30, 200)):
            body = {"model": "tiny", "input": [[5] * 30] * num_inputs}
            assert (await front.post("/v1/embeddings", body))[0] == expected
