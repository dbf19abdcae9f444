"""Timers against the obvious dictionary of instants."""

from hypothesis import given
from hypothesis import strategies as st

from nearline.controller.timers import TimerKey, Timers

KEYS = st.sampled_from("abcdef").map(lambda name: ("t", name))
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.integers(0, 50)),
    st.tuples(st.just("drop"), KEYS, st.just(0)),
    st.tuples(st.just("due"), st.just(("", "")), st.integers(0, 50)),
)


@given(st.lists(STEPS, max_size=200))
def test_timers_behave_like_a_dictionary_of_instants(steps: list[tuple[str, TimerKey, int]]) -> None:
    timers, model = Timers(), {}
    for what, key, at in steps:
        if what == "set":
            timers.set(key, float(at))
            model[key] = float(at)
        elif what == "drop":
            timers.drop(key)
            model.pop(key, None)
        else:
            found = timers.due(float(at))
            if found is None:
                assert all(instant > at for instant in model.values())
            else:
                assert model[found] == min(model.values()) <= at
                del model[found]
        assert timers.next_at() == min(model.values(), default=None)


def test_setting_a_key_over_and_over_does_not_pile_up() -> None:
    timers = Timers()
    for n in range(10_000):
        timers.set(("idle", "i"), float(n))
    assert len(timers._heap) < 200
    assert timers.next_at() == 9999.0


def test_equal_instants_come_in_the_order_they_were_set() -> None:
    timers = Timers()
    for name in "cab":
        timers.set(("t", name), 1.0)
    assert [timers.due(1.0) for _ in range(4)] == [("t", "c"), ("t", "a"), ("t", "b"), None]
