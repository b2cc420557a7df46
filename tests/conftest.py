"""What every test runs under: one thread, a profile store of the run, fixed seeds, fixed hypothesis examples.

The environment is set here, before anything imports torch, because its thread pools are sized once.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

_created = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Point TENSOROPT_CACHE at a folder that is empty when the run starts: no test reads a person's profiles.

    The workers of a run share it, so that what this machine's links and kernels take is measured once.
    """
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="tensoropt-cache-")
    os.environ["TENSOROPT_CACHE"] = folder
    config.stash[_created] = folder


def pytest_unconfigure(config: pytest.Config) -> None:
    if _created in config.stash:
        shutil.rmtree(config.stash[_created], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests, and the fixtures they are the first to ask for, draw the same numbers whatever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
