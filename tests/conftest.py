"""What every test runs under: one thread, a cache of its own, a fixed hypothesis profile.

The environment is set here, before anything imports torch, because its thread pools are sized once.
"""

from __future__ import annotations

import os
import shutil
import tempfile

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_created = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Point TENSOROPT_CACHE at an empty folder of this process, so no test reads a person's profiles."""
    folder = tempfile.mkdtemp(prefix="tensoropt-cache-")
    os.environ["TENSOROPT_CACHE"] = folder
    config.stash[_created] = folder


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_created], ignore_errors=True)
