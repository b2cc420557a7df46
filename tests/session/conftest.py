"""Stores of profiles, which keep what was timed, counted and searched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensoropt import Exploration, explore
from tensoropt.engine.models import ModelSpec
from tensoropt.profiling.store import ProfileStore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProfileStore]:
    """One that the tests of a module share."""
    with ProfileStore(tmp_path_factory.mktemp("store") / "profiles.sqlite") as opened:
        yield opened


@pytest.fixture
def empty_store(tmp_path: Path) -> Iterator[ProfileStore]:
    with ProfileStore(tmp_path / "profiles.sqlite") as opened:
        yield opened


@pytest.fixture(scope="module")
def model() -> Any:
    return ModelSpec("zoo:mlp", 0).build()


@pytest.fixture(scope="module")
def kept_once(
    model: Any, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Exploration, Path]:
    """An exploration as the module's ``ASKED`` says, and the folder of the store that keeps it."""
    folder = tmp_path_factory.mktemp("kept")
    with ProfileStore(folder / "profiles.sqlite") as opened:
        return explore(*model, store=opened, **request.module.ASKED | {"keep": True}), folder


@pytest.fixture
def found(kept_once: tuple[Exploration, Path]) -> Exploration:
    return kept_once[0]


@pytest.fixture
def kept_store(kept_once: tuple[Exploration, Path], tmp_path: Path) -> Iterator[ProfileStore]:
    """A store of its own for each test, which knows what the exploration has found."""
    shutil.copytree(kept_once[1], tmp_path / "kept")
    with ProfileStore(tmp_path / "kept" / "profiles.sqlite") as opened:
        yield opened
