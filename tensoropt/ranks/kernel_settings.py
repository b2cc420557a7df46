"""PyTorch's settings that decide which kernels run; measurements hold only under the same settings."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

_Fp32 = Literal["ieee", "tf32"]
"""The format in which GPUs compute float32 numbers."""
_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


@dataclass(frozen=True)
class KernelSettings:
    """PyTorch's settings of GPU kernels; the defaults are PyTorch's.

    Attributes:
        matmul, convolution, recurrent: format in which cuBLAS and cuDNN multiply float32 numbers.
        fp16_reduction, bf16_reduction: whether matrix products in this dtype may also accumulate in it.
        benchmark: whether cuDNN times its algorithms and uses the fastest.
        cudnn_deterministic, deterministic: whether only deterministic algorithms run, in cuDNN or anywhere.
    """

    matmul: _Fp32 = "ieee"
    convolution: _Fp32 = "tf32"
    recurrent: _Fp32 = "tf32"
    fp16_reduction: bool = True
    bf16_reduction: bool = True
    benchmark: bool = False
    cudnn_deterministic: bool = False
    deterministic: bool = False

    @classmethod
    def now(cls) -> KernelSettings:
        """Return this process's settings, or PyTorch's defaults if PyTorch is not imported."""
        if "torch" not in sys.modules and _OVERRIDE not in os.environ:
            return cls()
        import torch

        values: dict[str, Any] = {}
        for name, (owner, attribute) in _places().items():
            value = getattr(owner, attribute)
            value = value[0] if isinstance(value, tuple) else value  # PyTorch reports some together
            values[name] = "ieee" if value == "none" else value  # unchanged means ieee
        return cls(**values, deterministic=torch.are_deterministic_algorithms_enabled())

    def apply(self) -> None:
        """Make these the settings of this process."""
        import torch

        now = asdict(self.now())
        for name, value in asdict(self).items():
            if value == now[name]:
                continue
            if name == "deterministic":
                torch.use_deterministic_algorithms(value)
            elif name == "matmul":
                # Set by itself, PyTorch would refuse to report the precision of products.
                torch.set_float32_matmul_precision("highest" if value == "ieee" else "high")
            else:
                setattr(*_places()[name], value)

    def of(self, device_type: str) -> KernelSettings:
        """Return these settings, with PyTorch's defaults for all that have no effect on ``device_type``."""
        return self if device_type == "cuda" else KernelSettings(deterministic=self.deterministic)

    @property
    def words(self) -> str:
        """The settings that differ from PyTorch's defaults, as ``name=value,...``; "" if none differs."""
        own = asdict(KernelSettings())
        return ",".join(f"{name}={value}" for name, value in asdict(self).items() if value != own[name])


def _places() -> dict[str, tuple[Any, str]]:
    """Return setting -> the object and attribute in which PyTorch keeps it, except ``deterministic``."""
    import torch

    backends: Any = torch.backends  # whose stubs lack some of them
    return {
        "matmul": (backends.cuda.matmul, "fp32_precision"),
        "convolution": (backends.cudnn.conv, "fp32_precision"),
        "recurrent": (backends.cudnn.rnn, "fp32_precision"),
        "fp16_reduction": (backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        "bf16_reduction": (backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
        "benchmark": (backends.cudnn, "benchmark"),
        "cudnn_deterministic": (backends.cudnn, "deterministic"),
    }
