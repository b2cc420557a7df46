"""Costs kept with an exploration: what is saved comes back, and what an older version saved is refused."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration_files import RECORDED as FILE
from tensoropt.plan.recorded import Recorded, read_recorded
from tensoropt.profiling.link_fits import Transition
from tensoropt.profiling.links import LinkFits

READY_MADE = Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100" / FILE
LINKS = LinkFits(
    collectives={},
    transitions={
        (0, 1): Transition(
            works_s=(0.0, 1e-3, 4e-3),
            sizes=(4096, 65536),
            arriving_s=((0.0, 0.0), (1e-4, 2e-4), (1e-4, 3e-4)),
            leaving_s=((0.0, 0.0), (1e-5, 2e-5), (1e-5, 4e-5)),
        )
    },
)


@pytest.fixture
def recorded() -> Recorded:
    saved = read_recorded(READY_MADE.read_bytes(), READY_MADE)
    works = dict(list(saved.compute.works.items())[:2])
    part = replace(saved.whole, compute=replace(saved.compute, works=works))
    return replace(saved, links={"2x4": LINKS}, parts={"a device A100-80GB": part})


def test_what_is_saved_comes_back(recorded: Recorded, tmp_path: Path) -> None:
    recorded.save(tmp_path / FILE)
    found = read_recorded((tmp_path / FILE).read_bytes(), tmp_path / FILE)
    assert found.links == recorded.links
    assert found.whole == recorded.whole
    assert found.parts == recorded.parts


@pytest.mark.parametrize(
    "old",
    [
        {"collectives": [], "pairs": [], "arrivals": [[[0], [[0.0, 0.0], [1e-3, 1e-4]]]]},
        {"collectives": [], "pairs": [], "transitions": [[[0], {"leaving_s": [1e-5, 4e-5]}]]},
    ],
    ids=["one time after work", "by size alone"],
)
def test_links_of_an_older_version_are_refused(recorded: Recorded, tmp_path: Path, old: object) -> None:
    recorded.save(tmp_path / FILE)
    data = json.loads(gzip.decompress((tmp_path / FILE).read_bytes()))
    data["links"]["2x4"] = old
    (tmp_path / FILE).write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(TensorOptError, match=r"is damaged .*; explore again"):
        read_recorded((tmp_path / FILE).read_bytes(), tmp_path / FILE)
