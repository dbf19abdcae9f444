"""No stream waits longer between tokens than was promised, whatever prompts arrive: in virtual time, with controls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine import EngineConfig, EngineCore
from nearline.engine.step_budget import MIN_CHUNK
from nearline.protocol import StepTimeModel
from tests.engine.fake_engine import info
from tests.engine.timed_engine import LAW, Job, Served, TimedEngine

STREAMS = [Job(f"s{i}", 0.0, 100, 200) for i in range(4)]
HUGE = Job("huge", 0.4, 2000, 4)


def longest_gap(served: dict[str, Served]) -> float:
    return max(one.longest_gap_s for name, one in served.items() if name.startswith("s"))


@pytest.mark.parametrize("tpot_s", [0.03, 0.05, 0.1])
def test_a_huge_prompt_raises_no_gap_above_the_target(tpot_s: float) -> None:
    engine = TimedEngine(tpot_s=tpot_s)
    served = engine.run(*STREAMS, HUGE)
    assert longest_gap(served) <= tpot_s * 1.0001
    chunks = [item.num_tokens for _, _, batch in engine.steps for item in batch.items if item.num_tokens > 1]
    whole = [n for n in chunks if n > MIN_CHUNK]
    assert sum(chunks) == 2000 + 4 * 100
    assert max(whole) > 40, "the time there is, is used"


def test_without_a_budget_it_does() -> None:
    assert longest_gap(TimedEngine(max_step_tokens=None, tpot_s=0.05).run(*STREAMS, HUGE)) > 0.5


def test_a_request_is_held_to_its_own_target() -> None:
    strict = [replace(job, tpot_s=0.02) for job in STREAMS[:1]]
    assert longest_gap(TimedEngine(tpot_s=0.1).run(*strict, *STREAMS[1:], HUGE)) <= 0.0201


def test_with_nobody_decoding_a_prompt_goes_in_the_largest_pieces() -> None:
    engine = TimedEngine(tpot_s=0.01)
    engine.run(Job("alone", 0.0, 1500, 2))
    assert [batch.items[0].num_tokens for _, _, batch in engine.steps[:3]] == [512, 512, 476]


def test_a_target_that_decodes_alone_miss_still_lets_prompts_advance() -> None:
    engine = TimedEngine(tpot_s=0.001)
    served = engine.run(*STREAMS, HUGE)
    alone = LAW.decode_s(4, 4 * 300)
    assert longest_gap(served) <= max(1.5 * alone, LAW.prefill_s(MIN_CHUNK, 2000) + alone) * 1.001
    assert served["huge"].tokens


@pytest.mark.parametrize("slowness", [0.2, 1.0, 5.0])
def test_without_a_profile_the_pace_is_learned_before_it_hurts(slowness: float) -> None:
    """A device 5 times slower than a guess may exceed the target in the first chunk, not in the second prompt."""
    law = StepTimeModel(**{name: slowness * getattr(LAW, name) for name in LAW.__dataclass_fields__})
    target = 0.1 * max(1.0, slowness)
    jobs = [replace(job, at=slowness * job.at, num_output=600) for job in (*STREAMS, HUGE)]
    engine = TimedEngine(law, believed=None, tpot_s=target)
    first = longest_gap(engine.run(*jobs))
    assert first <= 2 * target
    begun = engine.now
    jobs = [replace(job, name=f"{job.name}-2", at=begun + job.at) for job in jobs]
    assert longest_gap(engine.run(*jobs)) <= 1.1 * target


@settings(max_examples=40, deadline=None)
@given(
    per_token=st.floats(1e-5, 2e-3), base=st.floats(1e-3, 0.05), tpot_s=st.floats(0.02, 0.3),
    lengths=st.lists(st.integers(1, 1500), min_size=1, max_size=5),
)  # fmt: skip
def test_gaps_are_bounded_whatever_arrives(per_token: float, base: float, tpot_s: float, lengths: list[int]) -> None:
    law = replace(LAW, prefill_per_token_s=per_token, prefill_base_s=base, decode_base_s=base)
    prompts = [Job(f"p{i}", 0.1 * i, length, 3) for i, length in enumerate(lengths)]
    served = TimedEngine(law, law, tpot_s=tpot_s).run(Job("s", 0.0, 10, 60), *prompts)
    decode_s = law.decode_s(1 + len(lengths), 8000)
    least = law.prefill_s(MIN_CHUNK, 1500) + decode_s
    assert longest_gap(served) <= max(tpot_s, 1.5 * decode_s, least) * 1.001
    assert all(one.tokens for one in served.values())


@pytest.mark.parametrize("step_tokens", [512, None])
def test_no_step_is_longer_than_the_longest_that_was_foretold(step_tokens: int | None) -> None:
    engine = TimedEngine(max_step_tokens=step_tokens)
    foretold = engine.core.longest_step_s
    jobs = [Job(f"long{i}", 0.0, 8000, 100) for i in range(8)]
    engine.run(*jobs)
    longest = max(LAW.step_s(batch.work) for _, _, batch in engine.steps)
    assert longest <= foretold
    assert foretold < (20 * longest if step_tokens is None else 4.0)


def test_a_long_context_does_not_make_the_longest_step_long_and_steps_correct_a_guess() -> None:
    settings = EngineConfig(num_blocks=8192, max_running=8, step_time=None)
    large = EngineCore(info(max_context_tokens=131_072, num_bytes=14_000_000_000), settings)
    assert 10 * large.longest_step_s < 600, "ten of them are minutes"
    engine = TimedEngine(believed=None)
    guessed = engine.core.longest_step_s
    engine.run(*STREAMS, HUGE)
    assert engine.core.longest_step_s < guessed
