"""Settings of PyTorch that decide which kernels run: a figure holds for those under which it was measured.

They are those of a process. Ranks that measure take over those of the process that started them, and figures
that were measured under others than PyTorch's own are kept under a key of their own.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Fp32 = Literal["ieee", "tf32", "bf16"]
"""In what kernels compute with float32 numbers."""
_LEVELS = {("ieee", "ieee"): "highest", ("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}
"""What :func:`torch.set_float32_matmul_precision` calls some pairs (GPU, CPU)."""
_OF_CPU = ("cpu_matmul", "cpu_convolution", "cpu_recurrent", "deterministic")
_OVERRIDE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


@dataclass(frozen=True)
class KernelSettings:
    """PyTorch's settings, its own by default.

    Attributes:
        matmul, convolution, recurrent: what float32 numbers are computed in on GPUs (cuBLAS, cuDNN).
        cpu_matmul, cpu_convolution, cpu_recurrent: the same on CPU ranks (oneDNN).
        fp16_reduction, bf16_reduction: products of narrow types may add up in them.
        benchmark: cuDNN times its algorithms and takes the fastest.
        cudnn_deterministic, deterministic: only deterministic algorithms, of cuDNN or of all.
    """

    matmul: Fp32 = "ieee"
    convolution: Fp32 = "tf32"
    recurrent: Fp32 = "tf32"
    cpu_matmul: Fp32 = "ieee"
    cpu_convolution: Fp32 = "ieee"
    cpu_recurrent: Fp32 = "ieee"
    fp16_reduction: bool = True
    bf16_reduction: bool = True
    benchmark: bool = False
    cudnn_deterministic: bool = False
    deterministic: bool = False

    @classmethod
    def now(cls) -> KernelSettings:
        """Those of this process. PyTorch is not imported for that: it would have its own."""
        if "torch" not in sys.modules and _OVERRIDE not in os.environ:
            return cls()
        import torch

        # PyTorch says "none" of what nobody has set, which is ieee.
        told = {name: _owner(name).fp32_precision for name in _FP32}
        found: dict[str, Any] = {name: "ieee" if what == "none" else what for name, what in told.items()}
        found |= {name: bool(_first(getattr(_owner(name), what))) for name, what in _FLAGS.items()}
        return cls(**found, deterministic=torch.are_deterministic_algorithms_enabled())

    def apply(self) -> None:
        """Make these the settings of this process."""
        import torch

        level = _LEVELS.get((self.matmul, self.cpu_matmul))
        if level is not None and (self.matmul, self.cpu_matmul) != (self.now().matmul, self.now().cpu_matmul):
            # Set one by one, PyTorch would refuse to say how precise products are.
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
        """Those that matter on a type of device; the others are PyTorch's own."""
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
        """The settings that are not PyTorch's own, for keys and people; empty where all are."""
        own = asdict(KernelSettings())
        return ",".join(f"{name}={value}" for name, value in asdict(self).items() if value != own[name])


_FP32 = ("matmul", "convolution", "recurrent", "cpu_matmul", "cpu_convolution", "cpu_recurrent")
_FLAGS = {
    "fp16_reduction": "allow_fp16_reduced_precision_reduction",
    "bf16_reduction": "allow_bf16_reduced_precision_reduction",
    "benchmark": "benchmark",
    "cudnn_deterministic": "deterministic",
}
"""By setting the name that PyTorch has for it."""


def _owner(name: str) -> Any:
    """The module of PyTorch that has a setting."""
    import torch

    backends: Any = torch.backends  # whose stubs lack some
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
    """Some settings are told with others beside them."""
    return value[0] if isinstance(value, tuple) else value
