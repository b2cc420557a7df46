"""The conversion of a model into an operator graph, through ``torch.export``."""

from tensoropt.capture.convert import Mode as Mode
from tensoropt.capture.fidelity import rebuild as rebuild
from tensoropt.capture.loss import WithLoss as WithLoss
from tensoropt.capture.loss import find_loss as find_loss
from tensoropt.capture.pytorch import Capture as Capture
from tensoropt.capture.pytorch import capture as capture
from tensoropt.capture.results import OutputPlaces as OutputPlaces
from tensoropt.capture.results import Returned as Returned
from tensoropt.capture.results import WithResults as WithResults
