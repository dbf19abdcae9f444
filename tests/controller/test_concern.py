"""Whom every event and action is about: those that name a request or an instance are found by it."""

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from nearline.controller import events as happened
from nearline.controller.actions import Action
from nearline.controller.concern import Concern, Subject, subject
from nearline.controller.events import Event, RequestInfo
from nearline.protocol import FinishReason, InstanceId, InstanceSpec, InstanceState, InstanceStatus, ModelId, RequestId
from nearline.protocol.errors import ErrorInfo, InstanceFailed
from tests.controller.fleets import info, world

NAMES = {
    RequestInfo: info("the request"),
    InstanceStatus: InstanceStatus(InstanceId("i"), ModelId("a"), "d", InstanceState.READY),  # type: ignore[arg-type]
    InstanceSpec: InstanceSpec(InstanceId("i"), ModelId("a"), "d"),  # type: ignore[arg-type]
    RequestId: RequestId("the request"),
    InstanceId: InstanceId("i"),
}


@pytest.mark.parametrize("kind", [*get_args(Event), *get_args(Action)], ids=lambda kind: kind.__name__)
def test_every_event_and_action_is_about_the_request_and_the_instance_it_names(kind: type) -> None:
    hints = get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind)]
    item: Any = kind(**{name: NAMES.get(hints[name]) for name in fields})
    found = {hints[name] for name in fields}
    request_id = RequestId("the request") if found & {RequestInfo, RequestId} else None
    instance_id = InstanceId("i") if found & {InstanceStatus, InstanceSpec, InstanceId} else None
    assert subject(item) == Subject(request_id, instance_id)


def test_a_request_s_story_ends_with_it_and_holds_nobody_else_s() -> None:
    w = world("a")
    w.arrive("mine")
    w.start_all()
    w.arrive("noise")
    w.token("mine")
    w.crash(w.instances()[0])
    w.start_all()
    w.finish("mine", ErrorInfo.of(InstanceFailed("no memory")))
    concern = Concern(RequestId("mine"))
    for event, now in w.journal:
        for item in concern.of(event, []):
            assert subject(item).request_id in (RequestId("mine"), None), now
    later = happened.SequenceEnded(RequestId("mine"), 9, FinishReason.STOP)
    assert concern.of(later, []) == [later]
    assert concern.of(happened.InstanceChanged(*_status()), []) == []


def _status() -> Any:
    return ("n1", NAMES[InstanceStatus])
