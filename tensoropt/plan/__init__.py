"""Plans and explorations: what was found, choosing from it, and the files that keep it."""

from tensoropt.plan.exploration import Exploration, load_exploration
from tensoropt.plan.model_source import LoadedModel, load_model
from tensoropt.plan.plan import Plan, load_plan
from tensoropt.plan.point import Point
from tensoropt.plan.space import Space

__all__ = [
    "Exploration",
    "LoadedModel",
    "Plan",
    "Point",
    "Space",
    "load_exploration",
    "load_model",
    "load_plan",
]
