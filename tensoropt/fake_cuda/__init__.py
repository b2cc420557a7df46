"""CUDA devices without a GPU, for fake tensors."""

from tensoropt.fake_cuda.library import compiled, load, why_not

__all__ = ["compiled", "load", "why_not"]
