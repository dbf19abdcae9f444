"""The whole mind under random traffic: whatever happens, each request ends once, with what it generates alone."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nearline.engine import FreeAdapter, PolicyName
from nearline.protocol import FinishReason, Pooling, Request
from nearline.protocol.errors import ErrorInfo
from tests.engine.fake_engine import EOS, Engine, info, make_request, solo

ADAPTERS = ("x", "y", "z")
prompts = st.lists(st.integers(EOS + 1, 3), min_size=1, max_size=20)


class Traffic(RuleBasedStateMachine):
    """Requests good and bad, aborts, later attempts, adapters and steps, under any policy, in any order; then
    everything is let run to its end."""

    future_share = 1.0

    @initialize(
        num_blocks=st.integers(3, 14), budget=st.sampled_from([5, 8, None]), max_running=st.integers(1, 4),
        max_adapters=st.integers(1, 2), is_prefix_cached=st.booleans(), max_adapter_bytes=st.sampled_from([15, 1000]),
        policy=st.sampled_from(PolicyName), num_host_blocks=st.sampled_from([0, 3, 30]),
        num_bytes=st.sampled_from([1, 10**6, 10**9]),
    )  # fmt: skip
    def begin(self, budget: int | None, num_bytes: int, **config: Any) -> None:
        """The bytes of the model decide how long steps are believed to take; copies to the host take no time."""
        config |= {"checkpoint": info(num_bytes=num_bytes), "copy_bytes_per_s": 1e30}
        self.engine = Engine(max_step_tokens=budget, future_share=self.future_share, **config)
        self.requests: dict[str, tuple[Request, tuple[int, ...]]] = {}
        self.silenced: set[str] = set()
        self.on_device: set[str] = set()
        self.reading: list[str] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 16), priority=st.integers(0, 1), salt=st.sampled_from(["", "s"]),
          adapter=st.sampled_from([None, None, *ADAPTERS]), is_endless=st.booleans(),
          prompt_logprobs=st.sampled_from([None, None, 1]),
          pooling=st.sampled_from([None, None, None, *Pooling]), is_bad=st.sampled_from([False] * 9 + [True]),
          predicted=st.sampled_from([None, 1.0, 9.5]))  # fmt: skip
    def add(self, prompt: list[int], is_endless: bool, adapter: str | None, **fields: Any) -> None:
        name = f"r{len(self.requests)}"
        if fields["pooling"]:
            fields["prompt_logprobs"] = None
        elif fields["prompt_logprobs"] and fields["max_tokens"] == 1:
            fields["max_tokens"] = 0
        if fields.pop("is_bad"):
            self.engine.device.failing.add(name)
        predicted = fields.pop("predicted")
        one = make_request(name, prompt, adapter_digest=adapter, ignore_eos=is_endless, **fields)
        self.requests[f"{name}#1"] = (one, ())
        self.engine.add(one, predicted=predicted)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.alive()))
        assert self.engine.core.abort(key.split("#")[0], self.engine.tick())
        self.silenced.add(key)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def redispatch(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.alive()))
        name, attempt = key.split("#")
        one, generated = self.requests[key]
        generated += tuple(self.engine.outputs.get(key, ()))
        again = f"{name}#{int(attempt) + 1}"
        self.silenced.add(key)
        self.requests[again] = (one, generated)
        self.engine.add(one, attempt=int(attempt) + 1, generated=generated)

    @rule(digest=st.sampled_from(ADAPTERS))
    def announce(self, digest: str) -> None:
        self.engine.core.load_adapter(digest, f"/{digest}")

    @rule(digest=st.sampled_from(ADAPTERS))
    def prepare(self, digest: str) -> None:
        self.engine.core.load_adapter(digest, f"/{digest}", is_ahead=True)

    @rule(digest=st.sampled_from(ADAPTERS))
    def unload(self, digest: str) -> None:
        self.engine.core.unload_adapter(digest)

    @precondition(lambda self: self.reading)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def finish_reading(self, fails: bool) -> None:
        digest = self.reading.pop(0)
        if fails:
            error = ErrorInfo("adapter_mismatch", "wrong shape")
            self.engine.note(self.engine.core.adapter_failed(digest, error, self.engine.tick()))
        else:
            self.on_device.add(digest)
            self.engine.core.adapter_loaded(digest, 10, self.engine.tick())

    @rule()
    def step(self) -> None:
        for action in self.engine.core.adapter_actions():
            if isinstance(action, FreeAdapter):
                self.on_device.remove(action.digest)
            else:
                self.reading.append(action.digest)
        batch = self.engine.step()
        for item in batch.items if batch else ():
            digest = item.sequence.request.adapter_digest
            assert digest is None or digest in self.on_device, "a step needs an adapter that is not on the device"

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.core.check()
            assert self.engine.core.scheduler.num_preemptions == 0 or self.future_share < 1

    def alive(self) -> list[str]:
        return sorted(set(self.requests) - self.silenced - set(self.engine.ends))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            while self.reading:
                self.finish_reading(fails=False)
            self.step()
            if not self.alive():
                break
        assert not self.alive(), "a request never ended"
        self.engine.core.check()
        core = self.engine.core
        assert (core.load.num_running, core.load.num_waiting, core.load.kv_tokens_used) == (0, 0, 0)
        assert core.scheduler.host.num_used == 0
        assert core.num_added == core.num_ended == len(self.requests)
        for key in sorted(set(self.requests) - self.silenced):
            self._assert_right(key)

    def _assert_right(self, key: str) -> None:
        (request, generated), end = self.requests[key], self.engine.ends[key]
        if end.finish_reason is FinishReason.ERROR:
            is_bad = request.request_id in self.engine.device.failing
            assert is_bad or end.error.code in ("context_length_exceeded", "not_found", "adapter_mismatch")
            return
        output = [*generated, *self.engine.outputs[key]]
        if request.sampling.max_tokens == 0:
            assert output == []
            assert end.embedding == (None if request.pooling is None else b"vector")
            return
        alone = solo(request)
        room = self.engine.core.config.kv_tokens + 1 - len(request.prompt_token_ids)
        assert output == alone[: max(1, room)]


class OvercommittedTraffic(Traffic):
    """The negative control: without admission by future memory there are preemptions, and outputs still hold."""

    future_share = 0.0


class LongTraffic(Traffic):
    pass


class LongOvercommittedTraffic(OvercommittedTraffic):
    pass


_FEW = settings(max_examples=60, stateful_step_count=40, deadline=None)
Traffic.TestCase.settings = OvercommittedTraffic.TestCase.settings = _FEW
LongTraffic.TestCase.settings = LongOvercommittedTraffic.TestCase.settings = settings(_FEW, max_examples=1000)
TestTraffic = Traffic.TestCase
TestOvercommittedTraffic = OvercommittedTraffic.TestCase
TestLongTraffic = pytest.mark.slow(LongTraffic.TestCase)
TestLongOvercommittedTraffic = pytest.mark.slow(LongOvercommittedTraffic.TestCase)


@pytest.mark.slow
@pytest.mark.parametrize("policy", PolicyName)
def test_ten_thousand_requests_leave_nothing_behind(policy: PolicyName) -> None:
    import random

    draw = random.Random(1)
    config: dict[str, Any] = {"num_blocks": 40, "max_running": 8, "max_step_tokens": 24, "future_share": 0.3}
    config |= {"policy": policy, "num_host_blocks": 12, "copy_bytes_per_s": 1e30, "checkpoint": info(num_bytes=10**8)}
    engine = Engine(**config)
    for index in range(10_000):
        prompt = [draw.randint(1, 3) for _ in range(draw.randint(1, 30))]
        engine.add(make_request(f"r{index}", prompt, max_tokens=draw.randint(1, 20)))
        if draw.random() < 0.1:
            engine.core.abort(f"r{draw.randint(0, index)}", engine.tick())
        while len(engine.core.scheduler.waiting) > 20:
            engine.step()
    engine.drain()
    assert engine.core.num_ended == 10_000
    assert engine.core.load.kv_tokens_used == 0
    assert engine.core.scheduler.host.num_used == 0
    assert engine.core.scheduler.host.num_swaps > 0
    engine.core.check()
