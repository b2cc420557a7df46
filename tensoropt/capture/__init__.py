"""The conversion of a model into an operator graph, through ``torch.export``."""

from tensoropt.capture.convert import Mode
from tensoropt.capture.fidelity import rebuild
from tensoropt.capture.loss import Returned, WithLoss, find_loss
from tensoropt.capture.precision import COMPUTE_DTYPES
from tensoropt.capture.pytorch import Capture, capture

__all__ = ["COMPUTE_DTYPES", "Capture", "Mode", "Returned", "WithLoss", "capture", "find_loss", "rebuild"]
