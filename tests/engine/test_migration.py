"""An answer that moves between two real models in the middle: every token as without the move, in one stream."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from nearline.protocol import (
    AdapterSpec,
    CheckpointKind,
    Digest,
    FinishReason,
    ModelId,
    Request,
    RequestId,
    SamplingParams,
    SequenceTimings,
    SequenceUpdate,
)
from nearline.protocol.frames import Abort, Submit, Tokens
from tests.controller.fake_agent import FakeAgent
from tests.controller.fleets import MAX_RUNNING, checkpoint, model, report
from tests.controller.test_runtime import TOKEN, Fleet, collect, eventually, fleet

__all__ = ["fleet"]

PROMPT = (5, 17, 101, 9, 44, 3, 77)
GREEDY = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=200, temperature=1.0, seed=11, ignore_eos=True)


class Agent(FakeAgent):
    """A node whose sequences come from a real model, token by token, from whatever it was sent."""

    harness: Any

    async def _generate(self, submit: Submit) -> None:
        request, known = submit.request, submit.generated_token_ids
        tokens = [*request.prompt_token_ids, *known]
        for position in range(len(known), request.sampling.max_tokens):
            await asyncio.sleep(self.step_s)
            num_prompt = len(request.prompt_token_ids)
            sequence = self.harness.sequence(tokens, request.sampling, num_prompt=num_prompt)
            token = self.harness.generate([sequence], 1)[0][0]
            tokens.append(token)
            is_last = position == request.sampling.max_tokens - 1
            reason = FinishReason.LENGTH if is_last else None
            timings = SequenceTimings(0.0, 0.0, 0.004, 0) if position == len(known) else None
            update = SequenceUpdate(request.request_id, submit.attempt, (token,), reason, timings=timings)
            await self.send(Tokens(submit.instance_id, (update,)))


def request(name: str, sampling: SamplingParams, **settings: Any) -> Request:
    return Request(RequestId(name), ModelId("a"), PROMPT, sampling, **settings)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_tokens_are_those_of_an_answer_that_stays(
    fleet: Fleet, tiny_model: Callable[..., Any], bind: Callable[..., Any], sampling: SamplingParams
) -> None:
    runtime, source = fleet.runtime, tiny_model("Llama")
    alone = bind(source)
    expected = alone.generate([alone.sequence(PROMPT, sampling)], sampling.max_tokens)[0]
    lora = checkpoint("lora", 1000, CheckpointKind.ADAPTER)
    runtime.add_model(model("a", min_replicas=2, max_replicas=2))
    runtime.add_adapter(AdapterSpec(ModelId("lora"), ModelId("a"), lora, 0.0))
    digests = {"n1": ["digest-of-a", "lora"], "n2": ["digest-of-a"]}
    first, second = (Agent(fleet.url, report(name, 1, held), TOKEN) for name, held in digests.items())
    first.harness, second.harness = bind(source), bind(source)
    async with first, second:
        await eventually(lambda: sum(i.is_usable for i in runtime.core.fleet.instances.values()) == 2)
        short = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        warm = [runtime.open(request(f"w{n}", short)) for n in range(2 * MAX_RUNNING)]
        await asyncio.gather(*map(collect, warm))  # what answers take is known from here on
        handles = [runtime.open(request(f"r{n}", sampling)) for n in range(2 * MAX_RUNNING)]
        await eventually(lambda: all(len(handle.generated_token_ids) > 5 for handle in handles))
        gone = next(h for h in handles if h.track is not None and h.track.node_id == "n2")
        gone.cancel()
        late = request("late", short, adapter_id=ModelId("lora"), adapter_digest=Digest("lora"))
        other = runtime.open(late)
        await eventually(lambda: runtime.core.decisions()["migrated"] == 1)
        streams = await asyncio.gather(*(collect(handle) for handle in handles if handle is not gone))
        await collect(other)
    assert streams == [expected] * (2 * MAX_RUNNING - 1)
    (moved,) = (handle for handle in handles if handle.attempt == 2)
    assert [f.request_id for f in first.received if isinstance(f, Abort)] == [moved.request.request_id]
    (sent,) = (f for f in second.received if isinstance(f, Submit) and f.attempt == 2)
    assert 5 < len(sent.generated_token_ids) < sampling.max_tokens
    assert list(sent.generated_token_ids) == expected[: len(sent.generated_token_ids)]
