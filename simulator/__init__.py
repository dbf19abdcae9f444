"""Virtual time: the live controller's own decisions, driven through a cost model. Knows no policy."""

from nearline.simulator.arrivals import Arrival, Traffic, arrivals
from nearline.simulator.cost_model import CostModel
from nearline.simulator.loop import Outcome, Simulation
from nearline.simulator.node import SimulatedNode

__all__ = ["Arrival", "CostModel", "Outcome", "SimulatedNode", "Simulation", "Traffic", "arrivals"]
