"""Virtual time: the live controller's own decisions, driven through a cost model. Knows no policy."""

from nearline.simulator.arrivals import Arrival, Shape, Traffic, arrivals
from nearline.simulator.cost_model import CostModel, Machine, SimulatedModel
from nearline.simulator.faults import Faults
from nearline.simulator.fleet import Fleet, add_models, make_fleet, read_fleet
from nearline.simulator.loop import Simulation
from nearline.simulator.node import SimulatedNode, paced
from nearline.simulator.outcome import Call, Outcome
from nearline.simulator.policies import POLICIES, make_core
from nearline.simulator.report import report
from nearline.simulator.stepped import stepped
from nearline.simulator.traces import Spread, read_trace

__all__ = [
    "POLICIES",
    "Arrival",
    "Call",
    "CostModel",
    "Faults",
    "Fleet",
    "Machine",
    "Outcome",
    "Shape",
    "SimulatedModel",
    "SimulatedNode",
    "Simulation",
    "Spread",
    "Traffic",
    "add_models",
    "arrivals",
    "make_core",
    "make_fleet",
    "paced",
    "read_fleet",
    "read_trace",
    "report",
    "stepped",
]
