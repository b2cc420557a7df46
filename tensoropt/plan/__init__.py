"""Plans: their files, choosing a point, simulation."""

from tensoropt.plan.exploration import Exploration, Point, Space, load_exploration
from tensoropt.plan.model_source import LoadedModel, load_model
from tensoropt.plan.plan import Plan, load_plan

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
