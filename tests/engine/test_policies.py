"""Orders of service in virtual time: each claim with the control that breaks it.

The claims are those of the papers named in the policies; bounds are the ones their docstrings state.
"""

import random
from itertools import permutations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearline.engine import PolicyName
from nearline.engine.policy_mlfq import FeedbackQueue
from nearline.engine.sequence import Sequence
from tests.engine.fake_engine import make_request
from tests.engine.timed_engine import LAW, Job, Served, TimedEngine

FCFS, SHORTEST, MLFQ = PolicyName.FCFS, PolicyName.SHORTEST, PolicyName.MLFQ


def serve(policy: PolicyName, jobs: list[Job], **config: object) -> dict[str, Served]:
    settings = {"policy": policy, "max_running": 1, "is_prefix_cached": False} | config
    return TimedEngine(**settings).run(*jobs)  # type: ignore[arg-type]


def mean_total(served: dict[str, Served]) -> float:
    return fmean(one.total_s for one in served.values())


def order(served: dict[str, Served]) -> list[str]:
    return sorted(served, key=lambda name: served[name].tokens[0])


def batch_of(lengths: list[int], predict: object = None) -> list[Job]:
    guess = predict if callable(predict) else float
    return [Job(f"j{i}", 0.0, 8, n, predicted=guess(n)) for i, n in enumerate(lengths)]


# ---- shortest predicted first ----


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(2, 20), min_size=2, max_size=4))
def test_with_perfect_predictions_the_mean_is_the_best_of_all_orders(lengths: list[int]) -> None:
    best = mean_total(serve(SHORTEST, batch_of(lengths), wait_bound_s=1e9))
    for chosen in sorted(set(permutations(lengths))):
        assert best <= mean_total(serve(FCFS, batch_of(list(chosen)))) * 1.0001


def test_constant_predictions_are_first_come_and_inverted_ones_are_worse() -> None:
    draw = random.Random(3)
    lengths = [draw.randint(2, 120) for _ in range(30)]
    first = mean_total(serve(FCFS, batch_of(lengths)))
    assert mean_total(serve(SHORTEST, batch_of(lengths, lambda _: 50.0))) == pytest.approx(first)
    assert mean_total(serve(SHORTEST, batch_of(lengths), wait_bound_s=1e9)) < 0.8 * first
    assert mean_total(serve(SHORTEST, batch_of(lengths, lambda n: 200.0 - n), wait_bound_s=1e9)) > 1.1 * first


def flood(num_short: int = 150) -> list[Job]:
    """One long request among short ones that keep the engine full."""
    return [Job("long", 0.01, 8, 60, 60.0), *[Job(f"s{i}", 0.1 * i, 8, 20, 20.0) for i in range(num_short)]]


@pytest.mark.parametrize("wait_bound_s", [1.0, 5.0])
def test_nobody_is_overtaken_for_longer_than_the_bound(wait_bound_s: float) -> None:
    served = serve(SHORTEST, flood(), wait_bound_s=wait_bound_s)
    one_more = max(one.total_s - one.wait_s for name, one in served.items() if name != "long")
    assert served["long"].wait_s <= wait_bound_s + one_more + 0.1
    assert serve(SHORTEST, flood(), wait_bound_s=1e9)["long"].wait_s > 10, "without the bound it starves"


@settings(max_examples=20, deadline=None)
@given(jobs=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=20))
def test_under_any_predictions_only_the_older_go_before_whoever_has_waited_the_bound(jobs: list[tuple]) -> None:
    made = [Job(f"j{i}", at, 8, n, float(p)) for i, (at, n, p) in enumerate(jobs)]
    served = serve(SHORTEST, made, wait_bound_s=0.5)
    for one in made:
        begun, due = served[one.name].tokens[0], one.at + 0.5
        late = [o for o in made if due + 0.05 < served[o.name].tokens[0] - LAW.prefill_s(8) < begun and o.at > one.at]
        assert len(late) <= 1, "one may have begun just before"


# ---- skip-join multi-level feedback ----


def feedback(prefill_s: float = 0.0) -> tuple[FeedbackQueue, Sequence]:
    queue = FeedbackQueue(lambda _: prefill_s)
    sequence = Sequence(make_request("r", [1, 2, 3]), 1, [1, 2, 3], 0.0, serial=1)
    queue.join(sequence)
    return queue, sequence


@pytest.mark.parametrize(("prefill_s", "level"), [(0.0, 0), (0.01, 0), (0.011, 1), (0.02, 1), (0.5, 6), (3.0, 9)])
def test_a_newcomer_joins_the_first_level_that_its_prefill_fits_in(prefill_s: float, level: int) -> None:
    queue, sequence = feedback(prefill_s)
    assert queue.level(sequence) == level
    assert queue.quantum_s(level) >= prefill_s
    assert level == 0 or queue.quantum_s(level - 1) < prefill_s


def heavy_tailed(seed: int) -> list[Job]:
    draw = random.Random(seed)
    lengths = [min(800, int(8 * draw.paretovariate(0.9))) for _ in range(40)]
    return [Job(f"j{i}", i * 0.35 * draw.random(), 8, n) for i, n in enumerate(lengths)]


def test_short_answers_overtake_long_ones_without_predictions() -> None:
    """Heavy tails: the mean falls. Equal lengths: the order is that of arrival, and little is lost."""
    config = {"max_running": 2, "num_host_blocks": 4096, "copy_bytes_per_s": 1e12}
    gains = []
    for seed in range(3):
        first = serve(FCFS, heavy_tailed(seed), max_running=2)
        gains.append(mean_total(serve(MLFQ, heavy_tailed(seed), **config)) / mean_total(first))
    assert fmean(gains) < 0.8
    equal = [Job(f"j{i:02}", 0.01 * i, 8, 1) for i in range(20)]
    assert order(serve(MLFQ, equal)) == order(serve(FCFS, equal)) == [job.name for job in equal]


def test_levels_only_fall_but_for_promotion_and_a_prefill_is_never_interrupted() -> None:
    engine = TimedEngine(policy=MLFQ, max_running=2, is_prefix_cached=False)
    policy = engine.core.scheduler._policy
    assert isinstance(policy, FeedbackQueue)
    served = engine.run(*heavy_tailed(7), Job("huge", 0.1, 3000, 3))
    assert engine.core.scheduler.num_displaced > 0
    pieces = [(i, item) for i, (_, _, batch) in enumerate(engine.steps) for item in batch.items
              if item.sequence.request.request_id == "huge"]  # fmt: skip
    count = next(n for n, (_, item) in enumerate(pieces, start=1) if item.is_sampled)
    assert count > 5
    assert [i for i, _ in pieces[:count]] == list(range(pieces[0][0], pieces[0][0] + count))
    assert served["huge"].tokens


def test_nobody_starves_and_without_promotion_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [Job("long", 0.0, 8, 400), *[Job(f"s{i}", 0.02 + 0.0149 * i, 8, 2) for i in range(1000)]]
    num_live = 40  # at most this many were ever there at once: they come a little faster than they are served
    served = serve(MLFQ, jobs)
    assert served["long"].longest_gap_s <= 3.0 + num_live * (0.01 + 0.02) + 0.5
    monkeypatch.setattr("nearline.engine.core.FeedbackQueue", lambda f: FeedbackQueue(f, promote_after_s=None))
    assert serve(MLFQ, jobs)["long"].longest_gap_s > 10.0


# ---- all ----


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(PolicyName),
    jobs=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 300), st.integers(1, 40), st.integers(0, 1)), min_size=1, max_size=15
    ),
    num_blocks=st.integers(25, 80), future_share=st.sampled_from([0.0, 1.0]), num_host_blocks=st.sampled_from([0, 30]),
)  # fmt: skip
def test_under_every_policy_everybody_is_served_whole(policy: PolicyName, jobs: list[tuple], **config: int) -> None:
    made = [Job(f"j{i}", at, p, o, float(o), priority=u) for i, (at, p, o, u) in enumerate(jobs)]
    engine = TimedEngine(policy=policy, max_running=3, copy_bytes_per_s=1e12, **config)
    served = engine.run(*made)
    assert {job.name: job.num_output for job in made} == {name: len(one.tokens) for name, one in served.items()}
    assert engine.core.load.kv_tokens_used == engine.core.scheduler.host.num_used == 0
    if config["future_share"] == 1.0:
        assert engine.core.scheduler.num_preemptions == 0, "declared lengths: no block lacks in the middle"
    for _, _, batch in engine.steps:
        gone = {block for _, block in batch.swap_outs}
        assert not gone & {block for block, _ in batch.swap_ins}, "out and in again in one step"
