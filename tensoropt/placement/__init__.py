"""Placed plans: every operator on one device, in an order.

This package exports everything that a placing planner needs, which is numbers only: the problem, the
placement, and the simulator for both. :mod:`.graph` and :mod:`.prices` turn a model into such a problem,
:mod:`.strategy` says what every device runs, :mod:`.points` turns a placement into a plan, and
:mod:`.execute` runs it.
"""

from tensoropt.placement.order import TensorTransfer
from tensoropt.placement.problem import DeviceSet, MessageEnds, PlacedTensor, Placement, PlacementProblem
from tensoropt.placement.simulate import SimulatedPlacement, simulate_placement

__all__ = [
    "DeviceSet",
    "MessageEnds",
    "PlacedTensor",
    "Placement",
    "PlacementProblem",
    "SimulatedPlacement",
    "TensorTransfer",
    "simulate_placement",
]
