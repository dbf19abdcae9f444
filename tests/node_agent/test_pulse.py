"""When silence means that an engine hangs, by literal instants."""

from nearline.node_agent.pulse import Pulse, Verdict, patience_s
from nearline.protocol import CheckpointInfo, CheckpointKind, Digest, StepProfile, StepTimeModel

FINE, ASK, HUNG = Verdict.FINE, Verdict.ASK, Verdict.HUNG


def looks(pulse: Pulse, *instants: float) -> list[Verdict]:
    return [pulse.look(now) for now in instants]


def test_a_process_is_asked_and_asked_again_once_it_has_answered() -> None:
    pulse = Pulse()
    pulse.watch(10)
    assert looks(pulse, 0, 2, 4) == [ASK, FINE, FINE]
    pulse.answered(1)
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
    pulse.answered(1)
    pulse.look(2)
    pulse.answered(1)
    assert looks(pulse, 5, 9, 12) == [FINE, FINE, HUNG]


def test_an_agent_that_was_asleep_itself_blames_nobody_until_it_has_looked_again() -> None:
    pulse = Pulse()
    pulse.watch(10)
    assert looks(pulse, 0, 500, 502) == [ASK, FINE, FINE]
    pulse.answered(1)
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


def checkpoint(num_bytes: int, context: int) -> CheckpointInfo:
    kind = CheckpointKind.MODEL
    return CheckpointInfo(Digest("d"), kind, num_bytes, "llama", "L", "src", "bfloat16", (), max_context_tokens=context)


def test_patience_grows_with_the_longest_step_and_a_measured_one_is_believed() -> None:
    small, large = checkpoint(270_000_000, 8192), checkpoint(14_000_000_000, 8192)
    assert patience_s(small, None, 30) == 30
    assert patience_s(large, None, 30) > 300
    model = StepTimeModel(
        prefill_base_s=0.01, prefill_per_token_s=0.001, prefill_per_square_s=0.0,
        decode_base_s=0.01, decode_per_context_s=0.0, decode_per_sequence_s=0.0,
    )  # fmt: skip
    profile = StepProfile(Digest("d"), "cpu", 2, model, 0.1, 0.1, 20, 1e9, 0.0)
    assert patience_s(large, profile, 5) == 2 * (0.01 + 8.192)
