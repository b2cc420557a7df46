"""The facts about the machine that a reader of a report needs, and nothing about who uses it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import warnings
from pathlib import Path
from typing import Any

from tensoropt.version import __version__

_PACKAGES = ("torch", "numpy", "triton", "transformers", "nvidia-ml-py")


def machine(device: str) -> dict[str, Any]:
    """Return the processor, memory, system and versions; for a GPU its name, memory, driver, clocks and
    precision settings. No names of users, hosts or folders, and no serial numbers."""
    import torch

    from tensoropt.cluster import available_cores

    facts: dict[str, Any] = {
        "tensoropt": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(available_cores()),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "load": round(os.getloadavg()[0], 2),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "torch_cuda": torch.version.cuda,
        "precision": {
            "matmul": torch.get_float32_matmul_precision(),
            "tf32_matmul": torch.backends.cuda.matmul.allow_tf32,
            "tf32_cudnn": torch.backends.cudnn.allow_tf32,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
        "device": device,
    }
    return facts | ({"gpu": gpu()} if device == "cuda" else {})


def gpu() -> dict[str, Any]:
    """Return the first GPU that PyTorch sees, with what NVML says about it if NVML answers."""
    import torch

    by_nvml = _nvml()  # first: what is used of the GPU is then not yet this process's
    properties = torch.cuda.get_device_properties(0)
    facts: dict[str, Any] = {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": _nccl(),
    }
    return facts | by_nvml


def _nccl() -> str | None:
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _nvml() -> dict[str, Any]:
    """Return the driver, the clocks, the power and what else uses the GPU, through PyTorch's own access to
    NVML, which respects ``CUDA_VISIBLE_DEVICES``."""
    import torch

    try:
        import pynvml

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = torch.cuda._get_pynvml_handler(0)
        ask = {
            "driver": lambda: _text(pynvml.nvmlSystemGetDriverVersion()),
            "clock_hz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 10**6,
            "most_clock_hz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM) * 10**6,
            "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
            "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
            "busy_percent": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "used_bytes": lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        }
    except Exception as error:
        return {"nvml": f"does not answer ({type(error).__name__})"}
    facts: dict[str, Any] = {}
    for name, question in ask.items():
        try:
            facts[name] = question()
        except pynvml.NVMLError:  # a GPU need not know all of it
            facts[name] = None
    return facts


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return named or platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
