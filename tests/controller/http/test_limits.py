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
