"""One exploration for the tests of what is said of a point, made once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tensoropt
from tensoropt.exploration.exploration import Exploration, load_exploration
from tensoropt.plan.kinds import PIPELINED, PLACED
from tensoropt.profiling.store import ProfileStore
from tensoropt.report.detail import detail
from tensoropt.report.step_parts import Detail
from tests.costs.models import gpt2
from tests.situations.branching import build_two_towers


@dataclass(frozen=True)
class Explored:
    """An exploration as loaded from its folder, and the store that it was made with."""

    found: Exploration
    folder: Path
    store: ProfileStore


@pytest.fixture(scope="package")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Explored]:
    """A tiny GPT-2 on four GPUs that are not here."""
    path = tmp_path_factory.mktemp("exploration")
    with ProfileStore(path / "profile.sqlite") as store:
        model, args, kwargs = gpt2(n_layer=1)
        found = tensoropt.explore(
            model, args, kwargs, cluster="rtx-4090", micro_batches=(1, 2), epsilon=0.05, placements="never",
            pipelines="never", store=store,
        )  # fmt: skip
        found.save(path / "saved")
        yield Explored(load_exploration(path / "saved"), path / "saved", store)


@pytest.fixture(scope="package")
def details(gpus: Explored) -> list[tuple[int, Detail]]:
    """Some points of it by index, from the leanest to the fastest."""
    last = len(gpus.found.points) - 1
    return [(index, detail(gpus.found, index)) for index in sorted({0, last // 3, last // 2, last})]


@pytest.fixture(scope="package")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Exploration]]:
    """Explorations with pipelines and with placed plans, by the name of the kind, as loaded from disk."""
    path = tmp_path_factory.mktemp("staged")
    models = {
        PIPELINED.name: (gpt2(n_layer=1), {"constraints": {"pipeline": {"stages": 2, "schedule": "1f1b"}}}),
        PLACED.name: ((*build_two_towers(), {}), {"pipelines": "never", "placements": "always"}),
    }
    with ProfileStore(path / "profile.sqlite") as store:
        loaded = {}
        for name, (called, chosen) in models.items():
            asked = {"cluster": "dgx-a100[2]", "measure": "never", "epsilon": 0.05, **chosen}
            found = tensoropt.explore(*called, store=store, **asked)
            assert any(point.kind.name == name for point in found.points)
            found.save(path / name)
            loaded[name] = load_exploration(path / name)
        yield loaded
