"""The runtime carries out what the core decides about places: frames of priority, expected length and giving way."""

import asyncio
from dataclasses import replace

from nearline.protocol import Slo, SloClass
from nearline.protocol.frames import Submit, Yield
from tests.controller.test_runtime import Fleet, collect, eventually, fleet, request

__all__ = ["fleet"]


async def test_a_batch_answer_gives_way_on_its_engine_and_both_streams_are_whole(fleet: Fleet) -> None:
    async with fleet.agent() as agent:
        batch = Slo(SloClass.BATCH_1M)
        handles = [fleet.runtime.open(replace(request(f"b{n}", 150), slo=batch)) for n in range(6)]
        await eventually(lambda: all(handle.generated_token_ids for handle in handles))
        urgent = fleet.runtime.open(replace(request("urgent", 5), slo=Slo(ttft_s=0.2)))
        assert await collect(urgent) == [1000, 1001, 1002, 1003, 1004]
        given = [frame for frame in agent.received if isinstance(frame, Yield)]
        assert [frame.request_id for frame in given] == ["b5"]
        submits = {f.request.request_id: f for f in agent.received if isinstance(f, Submit)}
        assert submits["urgent"].request.priority < submits["b0"].request.priority
        assert (submits["b0"].predicted_tokens or 0) > 0
        assert fleet.runtime.counters.num_preemptions == 1
        assert fleet.runtime.snapshot()["decisions"][0]["preempted"] == 1
        assert await asyncio.gather(*map(collect, handles)) == [list(range(1000, 1150))] * 6
        assert fleet.runtime.counters.num_redispatches == 0
