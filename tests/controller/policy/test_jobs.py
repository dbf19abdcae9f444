"""What becomes of jobs: a table of ends, and how urgent an attempt is."""

import pytest

from nearline.controller.policy.jobs import Expire, Fail, Retry, Verdict, promise, verdict
from nearline.protocol import SloClass
from nearline.protocol.errors import (
    DeadlineExceeded,
    InstanceFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    StorageFull,
)

ROWS: list[tuple[BaseException, int, Verdict]] = [
    (DeadlineExceeded("late"), 1, Expire()),
    (InvalidRequest("no"), 1, Fail()),
    (ModelNotFound("gone"), 3, Fail()),
    (InstanceFailed("died"), 1, Retry(1.0, True)),
    (InstanceFailed("died"), 4, Retry(8.0, True)),
    (InstanceFailed("died"), 900, Retry(30.0, True)),
    (Overloaded("full", retry_after_s=17.0), 2, Retry(17.0, False)),
    (StorageFull("no room"), 1, Retry(1.0, False)),
    (KeyError("a defect of ours"), 2, Retry(2.0, True)),
]


@pytest.mark.parametrize(("error", "attempt", "expected"), ROWS)
def test_a_failed_attempt_is_judged_by_its_error(error: BaseException, attempt: int, expected: Verdict) -> None:
    assert verdict(error, attempt) == expected


@pytest.mark.parametrize(
    ("left_s", "slo_class", "deadline_s"),
    [
        (None, SloClass.BATCH_1M, 1.0),
        (0.2, SloClass.BATCH_1M, 1.0),
        (120.0, SloClass.BATCH_1M, 120.0),
        (121.0, SloClass.BATCH_1H, 121.0),
    ],
)
def test_the_time_left_makes_the_class(left_s: float | None, slo_class: SloClass, deadline_s: float) -> None:
    found = promise(left_s)
    assert (found.slo_class, found.deadline_s) == (slo_class, deadline_s)
