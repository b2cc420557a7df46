"""A library that gives a process CUDA devices that do nothing, so that fake tensors can live there.

``FakeTensorMode`` makes tensors on ``cuda`` in a PyTorch that was built without CUDA, but autograd aborts the
process on them, as it has no device guard for them. With a guard, forward and backward of a program run, and
dispatch modes see CUDA's own operators: a tensor made on the CPU by mistake is an error, and attention
kernels save what they save on a GPU. There are no numbers and no streams.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tensoropt.errors import TensorOptError

SOURCE = Path(__file__).with_name("device.cpp")
DEVICES = 8
"""Of a process that answers cases."""
_LIMIT_S = 600
"""Seconds that compiling may take; it takes about twenty on one core."""


def why_not() -> str:
    """Return the reason why this machine cannot have fake CUDA devices; empty if it can."""
    if not sys.platform.startswith("linux"):
        return f"fake CUDA devices are compiled for Linux only, and this is {sys.platform}"
    if shutil.which("g++") is None:
        return "there is no g++ to compile fake CUDA devices with; install one (apt-get install g++)"
    return ""


def compiled(folder: Path) -> Path:
    """Return the path of the library, compiled into a folder unless it is already there.

    Args:
        folder: the folder, which is made if it is missing.

    Raises:
        TensorOptError: there is no compiler, or it fails.
    """
    if missing := why_not():
        raise TensorOptError(missing)
    version = importlib.metadata.version("torch")
    mark = hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]
    library = folder / f"libfake_cuda-{mark}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    torch = _torch_folder()
    with tempfile.TemporaryDirectory(dir=folder) as build_folder:
        made = Path(build_folder) / library.name
        command = [
            "g++", "-std=c++20", "-O0", "-fPIC", "-shared",
            f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", str(SOURCE), "-o", str(made),
            f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib", "-lc10", "-ltorch_cpu",
        ]  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        if run.returncode:
            words = run.stderr.strip().splitlines()
            first = next((line for line in words if "error" in line), words[0] if words else "no output")
            raise TensorOptError(f"g++ cannot compile fake CUDA devices for PyTorch {version}: {first}")
        os.replace(made, library)
    return library


def load(library: Path, devices: int = 1) -> None:
    """Give this process ``devices`` CUDA devices, before PyTorch is imported; they stay.

    Backward then runs in the thread that calls it.

    Raises:
        TensorOptError: PyTorch has been imported already.
    """
    if "torch" in sys.modules:
        raise TensorOptError(
            "fake CUDA devices must be loaded before PyTorch is imported; start another process for them"
        )
    os.environ["FAKE_CUDA_DEVICES"] = str(devices)
    ctypes.CDLL(str(library))
    import torch

    # Autograd's own thread of a device drops what it saved after backward has returned; where the interpreter
    # ends meanwhile, the process aborts.
    torch.autograd.set_multithreading_enabled(False)


def _torch_folder() -> Path:
    # Importing PyTorch to ask it would be too early.
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
