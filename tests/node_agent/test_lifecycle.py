"""The life of an instance: one table, drawn in the README, and nothing outside it."""

from pathlib import Path

import pytest

from nearline.node_agent.lifecycle import TRANSITIONS, LifecycleEvent, is_final, markdown_table, next_state
from nearline.protocol import InstanceState
from nearline.protocol.errors import NearlineError

README = Path(__file__).resolve().parents[2] / "node_agent" / "README.md"


def test_the_readme_shows_the_table() -> None:
    assert markdown_table() in README.read_text()


def test_an_undisturbed_life_runs_from_pending_to_stopped() -> None:
    state = InstanceState.PENDING
    lived = [state]
    for event in ("slot_granted", "bind_sent", "bound", "stop_wished", "released"):
        state = next_state(state, LifecycleEvent(event))
        lived.append(state)
    assert lived == ["pending", "starting", "loading", "ready", "draining", "stopped"]


@pytest.mark.parametrize("state", [s for s in InstanceState if s not in ("stopped", "failed")])
def test_every_living_state_may_fail(state: InstanceState) -> None:
    assert next_state(state, LifecycleEvent.FAILED) is InstanceState.FAILED


def test_what_the_table_lacks_raises() -> None:
    for state in InstanceState:
        for event in LifecycleEvent:
            if event not in TRANSITIONS[state]:
                with pytest.raises(NearlineError, match=state.value):
                    next_state(state, event)


def test_only_stopped_and_failed_are_final() -> None:
    assert [s for s in InstanceState if is_final(s)] == ["stopped", "failed"]
