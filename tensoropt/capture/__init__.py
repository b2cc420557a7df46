"""The conversion of a model into an operator graph, through ``torch.export``."""

from tensoropt.capture.convert import Mode
from tensoropt.capture.fidelity import rebuild
from tensoropt.capture.loss import WithLoss
from tensoropt.capture.pytorch import Capture, capture
from tensoropt.capture.results import OutputPlaces, Returned, WithResults

__all__ = [
    "Capture",
    "Mode",
    "OutputPlaces",
    "Returned",
    "WithLoss",
    "WithResults",
    "capture",
    "rebuild",
]
