"""What every test runs under: one thread, kernels with checked indices, a profile store of the run, fixed
seeds, fixed hypothesis examples.

The environment is set here, before anything imports torch, because its thread pools are sized once, and
numba, which asks for its cache as kernels are declared.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"

# A compiled kernel that is given a wrong length reads what lies behind the array; here it raises IndexError.
# numba's cache does not tell kernels with checks from those without, so that these have one of their own,
# kept for the next run. NUMBA_BOUNDSCHECK=0 tests the kernels that people run. Where numba is there already
# (forks of tests/mutants) it has been told what it compiles.
if "numba" not in sys.modules and os.environ.setdefault("NUMBA_BOUNDSCHECK", "1") == "1":
    os.environ["NUMBA_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "checked_kernels")

# Workers, ranks and other processes share what one of them has compiled, also where bytecode is not kept
# elsewhere: collection alone takes a worker 15 seconds without it, 8 with it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tensoropt.profiling.store import ProfileStore
from tensoropt.ranks.pool import RankPool
from tests.fake_cuda.library import compiled, why_not
from tests.lent_ranks import leave_groups

# A fixed, small number of examples in every run; `make test-all` draws ten times as many, others each time.
settings.register_profile(
    "quick", deadline=None, suppress_health_check=list(HealthCheck), max_examples=25, derandomize=True
)
settings.register_profile(
    "thorough", parent=settings.get_profile("quick"), max_examples=250, derandomize=False
)
settings.load_profile("quick")


TIMEOUT_S = 600.0
"""Of a run on ranks, and of their start: a limit against hanging, not a measure of a machine."""
MANY_MODULES = 200
DRAWN = 2
"""Of a slow test's cases how many `make test-all` takes: others for each commit."""
_created = pytest.StashKey[str]()
_modules = pytest.StashKey[int]()
_swept = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quarter", type=int, help="only the files of this quarter (0 to 3) of all files")
    parser.addoption("--draw", metavar="SEED", help=f"{DRAWN} cases of each slow test, drawn by the seed")


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Make all but the first parameters of a sweep slow, and tests that use kept ranks distributed."""
    if {"ranks", "four_ranks"}.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("distributed")
    mark = item.get_closest_marker("sweep")
    if mark is not None and item.get_closest_marker("slow") is None:
        before = item.config.stash.setdefault(_swept, Counter())
        test = item.nodeid.partition("[")[0]
        before[test] += 1
        if before[test] > mark.kwargs.get("quick", 1):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out other quarters and what is not drawn, and put files that need ranks or a browser first.

    Workers begin with equal shares of the list and take what others have left from its end: most often, one
    worker starts ranks and a browser, and the others do not. What takes longest comes first, too.
    """
    quarter = config.getoption("--quarter")
    if quarter is not None:
        others = [item for item in items if crc32(item.path.name.encode()) % 4 != quarter % 4]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if crc32(item.path.name.encode()) % 4 == quarter % 4]
    if seed := config.getoption("--draw"):
        cases = defaultdict[str, list[pytest.Item]](list)
        for item in items:
            mark = item.get_closest_marker("slow")
            if mark is not None and not mark.kwargs.get("every"):
                cases[item.nodeid.partition("[")[0]].append(item)
        left = {
            item
            for test, of in cases.items()
            for item in random.Random(f"{seed} {test}").sample(of, max(len(of) - DRAWN, 0))
        }
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    shared = {"ranks", "four_ranks", "browser"}
    first = {
        item.path
        for item in items
        if item.get_closest_marker("distributed") or shared.intersection(getattr(item, "fixturenames", ()))
    }
    items.sort(key=lambda item: item.path not in first)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_modules] = 0
    _freeze_imported(session.config)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    _freeze_imported(item.config)


def _freeze_imported(config: pytest.Config) -> None:
    """Leave modules and collected tests out of garbage collections, also modules that tests import later.

    Each full collection would walk all of them, for a third of a second; captures cause so many that they
    would take a third of the time of all tests.
    """
    if len(sys.modules) >= config.stash[_modules] + MANY_MODULES:
        config.stash[_modules] = len(sys.modules)
        gc.collect()
        gc.freeze()
        # Python looks again after every 70,000 new objects where little is left to look through.
        gc.set_threshold(10_000)
        # It would count them one by one, in every exploration.
        gc.get_freeze_count = lambda: 1


@pytest.fixture(scope="session")
def two_kept_ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_kept_ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=TIMEOUT_S, start_timeout_s=TIMEOUT_S) as pool:
        yield pool


@pytest.fixture(scope="module")
def ranks(two_kept_ranks: RankPool) -> Iterator[RankPool]:
    """Two ranks, started once: starting costs seconds, a run milliseconds."""
    yield two_kept_ranks
    leave_groups(two_kept_ranks)


@pytest.fixture(scope="module")
def four_ranks(four_kept_ranks: RankPool) -> Iterator[RankPool]:
    yield four_kept_ranks
    leave_groups(four_kept_ranks)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ProfileStore]:
    with ProfileStore(tmp_path / "profiles.sqlite") as opened:
        yield opened


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests, and the fixtures they are the first to ask for, draw the same numbers whatever ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of fake CUDA devices; tests are skipped where it cannot be had, unless it is required."""
    if missing := why_not():
        if os.environ.get("TENSOROPT_FAKE_CUDA_REQUIRED"):
            pytest.fail(missing)
        pytest.skip(missing)
    folder = Path(os.environ["TENSOROPT_CACHE"]) / "fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    # The workers of a run share it: compiling takes a while.
    with FileLock(folder / "lock"):
        return compiled(folder)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces, 10.255.77.1 and 10.255.77.2, joined by ``wire``, a link of 160 Mbit/s;
    yields their names."""
    names = [f"tensoropt-{os.getpid()}-{side}" for side in "ab"]

    def run(command: str) -> None:
        done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(
                f"network namespaces with shaped links are refused here: {command}: {done.stderr.strip()}"
            )

    if not all(shutil.which(tool) for tool in ("ip", "tc")):
        pytest.skip("network namespaces need the commands ip and tc")
    try:
        for name in names:
            run(f"ip netns add {name}")
        a, b = names
        run(f"ip -n {a} link add wire type veth peer name wire netns {b}")
        for number, name in enumerate(names, start=1):
            run(f"ip -n {name} addr add 10.255.77.{number}/30 dev wire")
            run(f"ip -n {name} link set wire up")
            run(f"ip -n {name} link set lo up")
            run(f"ip netns exec {name} tc qdisc add dev wire root tbf rate 160mbit burst 128kb limit 8mb")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
