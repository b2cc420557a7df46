"""TensorOpt: a multi-objective cost-frontier explorer for distributed training."""

__version__ = "0.1.0"
