"""A tenant's limit as a client meets it: 429 with Retry-After, health and looking stay free."""

from typing import Any

from nearline.controller.limits import Limits
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
