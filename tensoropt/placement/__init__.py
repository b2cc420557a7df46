"""Placed plans: every operator on one device, in an order.

Exported here is what a placing planner needs, which is numbers only: the question, the answer, and the
simulator over both. How a model becomes such a question is in :mod:`.graph` and :mod:`.prices`, how an answer
becomes a plan in :mod:`.plans` and :mod:`.points`, how it runs in :mod:`.execute`.
"""

from tensoropt.placement.problem import DeviceSet, PlacedTensor, Placement, PlacementProblem
from tensoropt.placement.simulate import SimulatedPlacement, TensorTransfer, simulate_placement

__all__ = [
    "DeviceSet",
    "PlacedTensor",
    "Placement",
    "PlacementProblem",
    "SimulatedPlacement",
    "TensorTransfer",
    "simulate_placement",
]
