"""What one event still asks to be done before ControllerCore answers: actions, models to settle, timers. Pure."""

from dataclasses import dataclass, field

from nearline.controller.actions import Action
from nearline.controller.state import ModelKey, ModelRecord
from nearline.controller.timers import Timers


@dataclass(slots=True)
class Agenda:
    """Shared by the parts of the core. `touched` models are settled, and capacity is planned anew if asked for."""

    actions: list[Action] = field(default_factory=list)
    touched: dict[ModelKey, ModelRecord] = field(default_factory=dict)
    is_plan_due: bool = False
    timers: Timers = field(default_factory=Timers)

    def do(self, action: Action) -> None:
        self.actions.append(action)

    def touch(self, model: ModelRecord) -> None:
        self.touched[model.key] = model
