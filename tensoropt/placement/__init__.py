"""Placed plans: every operator on one device, in an order.

This package exports the problem, the placement and the simulator, all numbers, for placing planners. The
other modules turn a model into a problem, and a placement into a plan that runs.
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
