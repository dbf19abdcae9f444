"""When silence means that an engine hangs, by literal instants."""

from nearline.node_agent.pulse import Pulse, Verdict, patience_s

FINE, ASK, HUNG = Verdict.FINE, Verdict.ASK, Verdict.HUNG


def looks(pulse: Pulse, *instants: float) -> list[Verdict]:
    return [pulse.look(now) for now in instants]


def test_a_process_is_asked_and_asked_again_once_it_has_answered() -> None:
    pulse = Pulse()
    pulse.watch(10)
    assert looks(pulse, 0, 2, 4) == [ASK, FINE, FINE]
    pulse.answered(1, 10)
    assert looks(pulse, 6, 15) == [ASK, FINE]
    assert pulse.number == 2


def test_a_process_that_stays_silent_for_its_patience_hangs() -> None:
    pulse = Pulse()
    pulse.watch(10)
    assert looks(pulse, 0, 2, 4, 6, 8, 9.9, 10) == [ASK, FINE, FINE, FINE, FINE, FINE, HUNG]


def test_an_answer_to_an_older_question_counts_for_nothing() -> None:
    pulse = Pulse()
    pulse.watch(10)
    pulse.look(0)
    pulse.answered(1, 10)
    pulse.look(2)
    pulse.answered(1, 10)
    assert looks(pulse, 5, 9, 12) == [FINE, FINE, HUNG]


def test_an_agent_that_was_asleep_itself_blames_nobody_until_it_has_looked_again() -> None:
    pulse = Pulse()
    pulse.watch(10)
    assert looks(pulse, 0, 500, 502) == [ASK, FINE, FINE]
    pulse.answered(1, 10)
    assert looks(pulse, 504) == [ASK]


def test_a_process_at_rest_is_left_alone_and_an_old_question_does_not_count_afterwards() -> None:
    pulse = Pulse()
    assert looks(pulse, 0, 100) == [FINE, FINE]
    pulse.watch(10)
    pulse.look(100)
    pulse.rest()
    assert looks(pulse, 200, 300) == [FINE, FINE]
    pulse.watch(10)
    assert looks(pulse, 400, 401) == [ASK, FINE]


def test_an_answer_says_how_patient_to_be_and_none_is_expected_of_a_process_at_rest() -> None:
    pulse = Pulse()
    pulse.watch(1000)
    pulse.look(0)
    pulse.answered(1, 10)
    assert looks(pulse, 1, 3, 5, 10, 11) == [ASK, FINE, FINE, FINE, HUNG]
    pulse.rest()
    pulse.answered(pulse.number, 10)
    assert looks(pulse, 100, 200) == [FINE, FINE]


def test_patience_is_ten_of_the_longest_steps_and_never_less_than_what_was_configured() -> None:
    assert patience_s(0.0, 30) == 30
    assert patience_s(2.9, 30) == 30
    assert patience_s(12.0, 30) == 120
