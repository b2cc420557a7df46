"""Placed plans: every operator on one device, in an order. Pure numbers; see :mod:`.problem`."""

from tensoropt.placement.problem import DeviceSet as DeviceSet
from tensoropt.placement.problem import PlacedTensor as PlacedTensor
from tensoropt.placement.problem import Placement as Placement
from tensoropt.placement.problem import PlacementProblem as PlacementProblem
from tensoropt.placement.simulate import PlacedPlay as PlacedPlay
from tensoropt.placement.simulate import play_placement as play_placement
