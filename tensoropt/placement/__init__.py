"""Placed plans: every operator on one device, in an order."""

from tensoropt.placement.order import TensorTransfer
from tensoropt.placement.problem import DeviceSet, PlacedTensor, Placement, PlacementProblem
from tensoropt.placement.simulate import SimulatedPlacement, simulate_placement

__all__ = [
    "DeviceSet",
    "PlacedTensor",
    "Placement",
    "PlacementProblem",
    "SimulatedPlacement",
    "TensorTransfer",
    "simulate_placement",
]
