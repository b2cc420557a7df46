"""Model -> operator graph: PyTorch through ``torch.export``."""

from tensoropt.capture.pytorch import Capture, Mode, WithLoss, capture

__all__ = ["Capture", "Mode", "WithLoss", "capture"]
