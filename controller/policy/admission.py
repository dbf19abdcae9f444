"""Whether an arriving request may wait here at all. Refusals are early, honest and say when to come back. Pure."""

from nearline.controller.config import CoreConfig
from nearline.controller.estimate import retry_after_s
from nearline.controller.events import RequestInfo
from nearline.controller.policy.views import ModelView
from nearline.protocol import AdapterSpec
from nearline.protocol.errors import ErrorInfo, ModelNotFound, Overloaded


def refusal(
    info: RequestInfo,
    model: ModelView | None,
    adapter: AdapterSpec | None,
    num_waiting: int,
    config: CoreConfig,
) -> ErrorInfo | None:
    """Say why a request cannot be taken, or None. `num_waiting` counts waiting requests of all models."""
    if model is None:
        return ErrorInfo.of(
            ModelNotFound(f"model {info.model_id!r} is not registered; `nearline model list` shows all")
        )
    if info.adapter_id is not None and (adapter is None or adapter.base_id != info.model_id):
        text = f"adapter {info.adapter_id!r} of model {info.model_id!r} is not registered; see `nearline adapter list`"
        return ErrorInfo.of(ModelNotFound(text))
    held = model.queue.num_waiting
    if held >= config.max_held_per_model:
        text = f"{held} requests already wait for {info.model_id!r} (limit {config.max_held_per_model})"
    elif num_waiting >= config.max_held_total:
        text = f"{num_waiting} requests already wait here (limit {config.max_held_total})"
    else:
        return None
    wait_s = retry_after_s(model)
    return ErrorInfo.of(Overloaded(f"{text}; try again in {wait_s:.0f} s", retry_after_s=wait_s))
