"""What a body may ask for as its promise, and how it reaches the fleet."""

from typing import Any

import pytest

from nearline.protocol import Slo, SloClass
from tests.controller.http.conftest import FrontDoor

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
