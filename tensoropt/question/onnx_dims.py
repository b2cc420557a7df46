"""The open dims of an ONNX file, read in a separate process, since a server must not open model files.

``python onnx_dims.py FILE`` prints the names as a JSON list, quickly, as this needs no PyTorch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_MOST_S = 30.0
"""The most seconds that reading a file may take."""


def open_dims(path: Path) -> list[str]:
    """Return the names of the dims whose size a file leaves open, as ``--dim`` takes them.

    Raises:
        ValueError: the file is not an ONNX file; the message has the reason.
    """
    command = [sys.executable, __file__, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it could not be read within {_MOST_S:.0f} s") from None
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or ["its reader ended"])[-1][:200])
    return [str(name) for name in json.loads(done.stdout)]


def _read(path: str) -> list[str]:
    try:
        import onnx
    except ImportError:  # the job will report what to install
        return []
    graph = onnx.load(path, load_external_data=False).graph
    if not graph.node:
        raise ValueError("it has no operators")
    stored = {tensor.name for tensor in graph.initializer}
    return list(
        dict.fromkeys(
            dim.dim_param or f"{value.name}[{index}]"
            for value in graph.input
            if value.name not in stored
            for index, dim in enumerate(value.type.tensor_type.shape.dim)
            if not dim.dim_value > 0
        )
    )


if __name__ == "__main__":
    print(json.dumps(_read(sys.argv[1])))
