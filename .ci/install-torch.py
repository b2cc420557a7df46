"""Install torch into the running interpreter's environment, without CUDA where there is no GPU.

On Linux the public index serves a torch that pulls several gigabytes of CUDA wheels. On a machine
without an NVIDIA GPU pip is first asked what it *would* install (a dry run, metadata only). When that
has no CUDA in it — a local wheel, a mirror of CPU builds, another platform — it is installed as it
is, and no other index is contacted. Otherwise the CPU build is pinned (``torch==X+cpu``) and looked
up on ``--index`` as well; as the local version label exists only there, CUDA cannot slip in.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def pinned() -> str:
    """The line ``torch==X`` of constraints.txt."""
    match = re.search(r"^torch==\S+", CONSTRAINTS.read_text(), re.MULTILINE)
    if match is None:
        sys.exit(f"{CONSTRAINTS} has no line torch==VERSION")
    return match.group()


def has_gpu() -> bool:
    if shutil.which("nvidia-smi"):
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    return Path("/proc/driver/nvidia/gpus").exists()


def pip(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    return subprocess.run(command, check=False)


def would_install(requirement: str) -> list[str] | None:
    """Names of the packages that pip would add for ``requirement``; None when it finds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        if pip("--quiet", "--dry-run", "--report", str(report), requirement).returncode:
            return None
        return [item["metadata"]["name"].lower() for item in json.loads(report.read_text())["install"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", required=True, help="index that has CPU builds of torch")
    parser.add_argument("--requirement", default="", help="install exactly this, whatever the machine")
    options = parser.parse_args()

    if options.requirement:
        return pip(options.requirement).returncode
    requirement = pinned()
    if sys.platform != "linux" or has_gpu():
        return pip(requirement).returncode

    names = would_install(requirement)
    if names is not None and not any(name.startswith(("nvidia-", "cuda-", "triton")) for name in names):
        return pip(requirement).returncode

    cpu_build = f"{requirement}+cpu"
    print(f"no NVIDIA GPU here: installing {cpu_build} with the help of {options.index}", flush=True)
    if pip("--retries", "1", "--extra-index-url", options.index, cpu_build).returncode == 0:
        return 0
    print(
        f"\n{cpu_build} could not be installed. Is {options.index} reachable from here?\n"
        "Name another index of CPU builds:   make install TORCH_INDEX=https://...\n"
        f"or accept the build with CUDA:      make install TORCH={requirement}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
