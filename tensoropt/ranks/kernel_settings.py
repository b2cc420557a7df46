"""PyTorch's settings that decide which kernels run; measurements hold only under the same settings."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

_Fp32 = Literal["ieee", "tf32", "bf16"]
"""The format in which kernels compute float32 numbers."""
_LEVELS = {("ieee", "ieee"): "highest", ("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
"""(GPU, CPU) formats -> the name in :func:`torch.set_float32_matmul_precision`."""
_OF_CPU = ("cpu_matmul", "cpu_convolution", "cpu_recurrent", "deterministic")
_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


@dataclass(frozen=True)
class KernelSettings:
    """PyTorch's kernel settings, with its defaults.

    Attributes:
        matmul, convolution, recurrent: the format in which GPUs compute float32 numbers (cuBLAS, cuDNN).
        cpu_matmul, cpu_convolution, cpu_recurrent: the same for CPU ranks (oneDNN).
        fp16_reduction, bf16_reduction: whether products may accumulate in these types.
        benchmark: whether cuDNN times its algorithms and uses the fastest.
        cudnn_deterministic, deterministic: only deterministic algorithms, in cuDNN or everywhere.
    """

    matmul: _Fp32 = "ieee"
    convolution: _Fp32 = "tf32"
    recurrent: _Fp32 = "tf32"
    cpu_matmul: _Fp32 = "ieee"
    cpu_convolution: _Fp32 = "ieee"
    cpu_recurrent: _Fp32 = "ieee"
    fp16_reduction: bool = True
    bf16_reduction: bool = True
    benchmark: bool = False
    cudnn_deterministic: bool = False
    deterministic: bool = False

    @classmethod
    def now(cls) -> KernelSettings:
        """Return this process's settings, without importing PyTorch."""
        if "torch" not in sys.modules and _OVERRIDE not in os.environ:
            return cls()
        import torch

        # PyTorch reports "none" for an unchanged setting, which means ieee.
        modes = {name: _owner(name).fp32_precision for name in _FP32}
        values: dict[str, Any] = {name: "ieee" if mode == "none" else mode for name, mode in modes.items()}
        values |= {name: bool(_first(getattr(_owner(name), mode))) for name, mode in _FLAGS.items()}
        return cls(**values, deterministic=torch.are_deterministic_algorithms_enabled())

    def apply(self) -> None:
        import torch

        level = _LEVELS.get((self.matmul, self.cpu_matmul))
        if level is not None and (self.matmul, self.cpu_matmul) != (self.now().matmul, self.now().cpu_matmul):
            # If they were set one by one, PyTorch would refuse to report the precision of products.
            torch.set_float32_matmul_precision(level)
        now = asdict(self.now())
        for name, value in asdict(self).items():
            if value == now[name]:
                continue
            if name == "deterministic":
                torch.use_deterministic_algorithms(value)
            else:
                setattr(_owner(name), _FLAGS.get(name, "fp32_precision"), value)

    def of(self, device_type: str) -> KernelSettings:
        """Return the settings that matter on a device type, with defaults for all others."""
        own = KernelSettings()
        return KernelSettings(
            **{
                field.name: getattr(
                    self if (field.name in _OF_CPU) == (device_type == "cpu") else own, field.name
                )
                for field in fields(self)
                if field.name != "deterministic"
            },
            deterministic=self.deterministic,
        )

    @property
    def words(self) -> str:
        """The settings that differ from PyTorch's defaults, for keys and people; "" if none."""
        own = asdict(KernelSettings())
        return ",".join(f"{name}={value}" for name, value in asdict(self).items() if value != own[name])


_FP32 = ("matmul", "convolution", "recurrent", "cpu_matmul", "cpu_convolution", "cpu_recurrent")
_FLAGS = {
    "fp16_reduction": "allow_fp16_reduced_precision_reduction",
    "bf16_reduction": "allow_bf16_reduced_precision_reduction",
    "benchmark": "benchmark",
    "cudnn_deterministic": "deterministic",
}
"""PyTorch's names of the setters."""


def _owner(name: str) -> Any:
    import torch

    backends: Any = torch.backends  # whose stubs lack some of them
    owners: dict[str, Any] = {
        "convolution": backends.cudnn.conv,
        "recurrent": backends.cudnn.rnn,
        "cpu_matmul": backends.mkldnn.matmul,
        "cpu_convolution": backends.mkldnn.conv,
        "cpu_recurrent": backends.mkldnn.rnn,
        "benchmark": backends.cudnn,
        "cudnn_deterministic": backends.cudnn,
    }
    return owners.get(name, backends.cuda.matmul)


def _first(value: Any) -> Any:
    """Return the first element, as PyTorch reports some settings together."""
    return value[0] if isinstance(value, tuple) else value
