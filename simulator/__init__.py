"""Virtual time: the live controller's own decisions, driven through a cost model. Knows no policy."""

from nearline.simulator.arrivals import Arrival, Shape, Traffic, arrivals
from nearline.simulator.cost_model import CostModel
from nearline.simulator.faults import Faults
from nearline.simulator.loop import Outcome, Simulation
from nearline.simulator.node import SimulatedNode
from nearline.simulator.traces import Spread, read_trace

__all__ = [
    "Arrival",
    "CostModel",
    "Faults",
    "Outcome",
    "Shape",
    "SimulatedNode",
    "Simulation",
    "Spread",
    "Traffic",
    "arrivals",
    "read_trace",
]
