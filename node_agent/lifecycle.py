"""The life of an instance: which event moves it where. Pure; the README's table is made from here."""

from enum import StrEnum

from nearline.protocol import InstanceState
from nearline.protocol.errors import NearlineError


class LifecycleEvent(StrEnum):
    """What can happen to an instance, in the order of an undisturbed life."""

    SLOT_GRANTED = "slot_granted"
    BIND_SENT = "bind_sent"
    BOUND = "bound"
    STOP_WISHED = "stop_wished"
    RELEASED = "released"
    FAILED = "failed"


_S, _E = InstanceState, LifecycleEvent

TRANSITIONS: dict[InstanceState, dict[LifecycleEvent, InstanceState]] = {
    _S.PENDING: {_E.SLOT_GRANTED: _S.STARTING, _E.STOP_WISHED: _S.STOPPED, _E.FAILED: _S.FAILED},
    _S.STARTING: {_E.BIND_SENT: _S.LOADING, _E.STOP_WISHED: _S.STOPPED, _E.FAILED: _S.FAILED},
    _S.LOADING: {_E.BOUND: _S.READY, _E.STOP_WISHED: _S.DRAINING, _E.FAILED: _S.FAILED},
    _S.READY: {_E.STOP_WISHED: _S.DRAINING, _E.FAILED: _S.FAILED},
    _S.DRAINING: {_E.RELEASED: _S.STOPPED, _E.FAILED: _S.FAILED},
    _S.STOPPED: {},
    _S.FAILED: {},
}
"""{state: {event: next state}}. What is absent is illegal; STOPPED and FAILED are final."""


def next_state(state: InstanceState, event: LifecycleEvent) -> InstanceState:
    """Give the state after `event`. Raises NearlineError when the table has no such move."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise NearlineError(f"an instance that is {state} cannot take {event}; this is a defect of the agent") from None


def is_final(state: InstanceState) -> bool:
    """Tell whether an instance in this state has ended."""
    return not TRANSITIONS[state]


def markdown_table() -> str:
    """Draw the table as the README shows it: one row per state, one column per event."""
    events = list(LifecycleEvent)
    rows = [["state", *events], ["---"] * (len(events) + 1)]
    rows += [[state.upper(), *(moves[e].upper() if e in moves else "·" for e in events)] for state, moves in _items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _items() -> list[tuple[InstanceState, dict[LifecycleEvent, InstanceState]]]:
    return [(state, TRANSITIONS[state]) for state in InstanceState]
