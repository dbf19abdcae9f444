"""The fleet's mind: its words and decisions. Hands (runtime, node links, HTTP) are imported by their own modules."""

from nearline.controller.actions import Action
from nearline.controller.config import CoreConfig
from nearline.controller.core import ControllerCore
from nearline.controller.events import Event, RequestInfo

__all__ = ["Action", "ControllerCore", "CoreConfig", "Event", "RequestInfo"]
