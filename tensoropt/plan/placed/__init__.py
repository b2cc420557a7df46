"""Placed plans: every operator on one device, in an order. Pure numbers; see :mod:`.problem`."""

from tensoropt.plan.placed.judge import PlacedPlay as PlacedPlay
from tensoropt.plan.placed.judge import play_placement as play_placement
from tensoropt.plan.placed.problem import DeviceSet as DeviceSet
from tensoropt.plan.placed.problem import PlacedTensor as PlacedTensor
from tensoropt.plan.placed.problem import Placement as Placement
from tensoropt.plan.placed.problem import PlacementProblem as PlacementProblem
