"""What a body may ask for as its promise, and how it reaches the fleet."""

from typing import Any

import pytest

from nearline.controller.durable.limits import Limits
from nearline.protocol import Slo, SloClass
from tests.controller.http.conftest import FrontDoor, serve

ROWS = [
    ({}, Slo()),
    ({"slo": "batch-1h"}, Slo(SloClass.BATCH_1H)),
    ({"ttft_ms": 250, "tpot_ms": 40}, Slo(ttft_s=0.25, tpot_s=0.04)),
    ({"slo": "batch-1m", "deadline_ms": 1500}, Slo(SloClass.BATCH_1M, deadline_s=1.5)),
    ({"deadline_s": 9.0, "deadline_ms": 1500}, Slo(deadline_s=1.5)),
]


@pytest.mark.parametrize(("wish", "expected"), ROWS)
async def test_a_request_carries_the_promise_its_body_asks_for(
    front: FrontDoor, wish: dict[str, Any], expected: Slo
) -> None:
    status, _, _ = await front.post("/v1/functions/tiny/invocations", {"prompt": "Hi", **wish})
    assert status == 200
    assert front.runtime.handles[0].request.slo == expected


@pytest.mark.parametrize("wish", [{"slo": "soon"}, {"ttft_ms": 0}, {"deadline_ms": -1}, {"tpot_ms": "fast"}])
async def test_a_promise_that_makes_no_sense_is_refused(front: FrontDoor, wish: dict[str, Any]) -> None:
    status, answer, _ = await front.post("/v1/functions/tiny/invocations", {"prompt": "Hi", **wish})
    assert (status, answer["error"]["param"]) == (400, next(iter(wish)))


async def test_a_function_s_own_promise_holds_where_a_request_says_nothing_and_can_be_changed(
    front: FrontDoor,
) -> None:
    async with front.session.patch(
        f"{front.url}/admin/models/tiny", json={"slo": "batch-1m", "ttft_ms": 1500, "keep_alive_s": 7.0}
    ) as response:
        assert response.status == 200
        changed = await response.json()
    assert (changed["keep_alive_s"], changed["slo"]["slo_class"], changed["slo"]["ttft_s"]) == (7.0, "batch-1m", 1.5)
    for wish, expected in [({}, Slo(SloClass.BATCH_1M, 1.5)), ({"slo": "interactive"}, Slo())]:
        status, _, _ = await front.post("/v1/functions/tiny/invocations", {"prompt": "Hi", **wish})
        assert status == 200
        assert front.runtime.handles[-1].request.slo == expected
    async with front.session.patch(f"{front.url}/admin/models/tiny", json={"ttft_ms": None}) as response:
        assert (await response.json())["slo"] == {
            "slo_class": "batch-1m", "ttft_s": None, "tpot_s": None, "deadline_s": None
        }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"min_replicas": 3}, "min_replicas"),
        ({"keep_alive_min_s": 400.0}, "keep_alive_min_s"),
        ({"slo": "soon"}, "slo"),
        ({"ttft": 1}, "ttft"),
    ],
)
async def test_settings_that_make_no_sense_change_nothing(
    front: FrontDoor, settings: dict[str, Any], param: str
) -> None:
    before = front.door.registry.models["tiny"]
    async with front.session.patch(f"{front.url}/admin/models/tiny", json=settings) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param
    assert front.door.registry.models["tiny"] == before
    async with front.session.patch(f"{front.url}/admin/models/nobody", json={}) as response:
        assert response.status == 404


async def test_a_tenant_s_cap_holds_whatever_its_requests_ask_for(make_door: Any) -> None:
    door, runtime = await make_door(limits=Limits.of([], ["default=batch-1m"]))
    async for front in serve(door, runtime):
        await front.post("/v1/functions/tiny/invocations", {"prompt": "Hi", "slo": "interactive", "ttft_ms": 50})
        assert runtime.handles[0].request.slo == Slo(SloClass.BATCH_1M, ttft_s=60.0)
