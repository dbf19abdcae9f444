"""Who is refused at the door, with what, and when they should come back."""

import pytest

from nearline.controller.config import CoreConfig
from nearline.controller.policy.admission import refusal
from nearline.controller.queues import RequestRecord
from nearline.controller.state import ModelRecord
from nearline.protocol import AdapterSpec, ModelId
from tests.controller.fleets import checkpoint, info, model

CONFIG = CoreConfig(max_held_per_model=20, max_held_total=50)


def record(num_waiting: int) -> ModelRecord:
    made = ModelRecord(model("a"), service_s=0.5)
    for n in range(num_waiting):
        made.queue.push(RequestRecord(info(f"r{n}"), made.digest, n, 0.0, 0.0))
    return made


ADAPTER = AdapterSpec(ModelId("x"), ModelId("a"), checkpoint("lora"), 0.0)


@pytest.mark.parametrize(
    ("num_waiting", "total", "wish", "adapter", "code"),
    [
        (0, 0, {}, None, None),
        (19, 49, {}, None, None),
        (20, 20, {}, None, "overloaded"),
        (0, 50, {}, None, "overloaded"),
        (0, 0, {"adapter_id": "x"}, ADAPTER, None),
        (0, 0, {"adapter_id": "x"}, None, "model_not_found"),
    ],
)
def test_refusals(
    num_waiting: int, total: int, wish: dict[str, object], adapter: AdapterSpec | None, code: str | None
) -> None:
    error = refusal(info("r", **wish), record(num_waiting), adapter, total, CONFIG)
    assert (error.code if error else None) == code


def test_a_refusal_under_load_names_the_queue_and_when_to_return() -> None:
    error = refusal(info("r"), record(20), None, 20, CONFIG)
    assert error is not None
    assert error.retry_after_s == 10.0, "20 waiting at 0.5 s each, one place"
    assert error.message == "20 requests already wait for 'a' (limit 20); try again in 10 s"


def test_an_unknown_name_is_not_found() -> None:
    error = refusal(info("r", "zz"), None, None, 0, CONFIG)
    assert error is not None
    assert error.code == "model_not_found"
    assert "'zz'" in error.message
