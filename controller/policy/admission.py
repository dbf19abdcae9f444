"""Whether an arriving request may wait here at all. Refusals are early, honest and say when to come back. Pure."""

from nearline.controller.config import CoreConfig, target_s
from nearline.controller.estimate import retry_after_s
from nearline.controller.events import RequestInfo
from nearline.controller.policy.views import ModelView
from nearline.controller.policy.waiting import Wait
from nearline.protocol import AdapterSpec
from nearline.protocol.errors import ErrorInfo, ModelNotFound, Overloaded, SloUnattainable


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


def unattainable(info: RequestInfo, end: Wait, config: CoreConfig) -> ErrorInfo | None:
    """Refuse a request whose own deadline passes before it can end; a retry would be later still."""
    deadline_s = info.slo.deadline_s
    if deadline_s is None or end.quantile_s(config.refusal_quantile) <= deadline_s:
        return None
    text = f"the answer would take about {end.mean_s:.1f} s from now and its deadline is in {deadline_s:.1f} s"
    return ErrorInfo.of(SloUnattainable(f"{text}; allow more time or ask for fewer tokens"))


def too_late(info: RequestInfo, wait: Wait, config: CoreConfig) -> ErrorInfo | None:
    """Refuse a request that would wait many times its class's target; what waits already shall be served in time."""
    limit_s = config.max_wait_targets * target_s(info.slo)
    if wait.quantile_s(config.refusal_quantile) <= limit_s:
        return None
    text = f"a request of class {info.slo.slo_class.value} would wait about {wait.mean_s:.0f} s (limit {limit_s:.0f} s)"
    back_s = min(60.0, max(1.0, wait.mean_s - target_s(info.slo)))
    return ErrorInfo.of(Overloaded(f"{text}; try again in {back_s:.0f} s", retry_after_s=back_s))
