"""Costs kept with an exploration: what is saved comes back, and what an older version saved is refused."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tensoropt.errors import TensorOptError
from tensoropt.exploration.exploration_files import RECORDED as FILE
from tensoropt.plan.recorded import read_recorded
from tensoropt.profiling.link_fits import LinkFit, Segment
from tensoropt.profiling.links import LinkFits

READY_MADE = Path(__file__).parents[2] / "app" / "data" / "gpt2-dgx-h100" / FILE
SEGMENTS = (Segment(alpha_s=1e-4, seconds_per_byte=1e-9),)
FIT = LinkFit(kind="all_reduce", group=(0, 1), segments=SEGMENTS, residual=0.01)
LINKS = LinkFits(collectives={("all_reduce", (0, 1)): (FIT,)})


@pytest.fixture
def recorded():
    saved = read_recorded(READY_MADE.read_bytes(), READY_MADE)
    part = replace(saved.whole, works=dict(list(saved.whole.works.items())[:2]))
    return replace(saved, links={"2x4": LINKS}, parts={"a device A100-80GB": part})


def test_what_is_saved_comes_back(recorded, tmp_path):
    recorded.save(tmp_path / FILE)
    found = read_recorded((tmp_path / FILE).read_bytes(), tmp_path / FILE)
    assert (found.links, found.whole) == (recorded.links, recorded.whole)
    assert found.parts == recorded.parts


def test_damaged_links_are_refused(recorded, tmp_path):
    recorded.save(tmp_path / FILE)
    data = json.loads(gzip.decompress((tmp_path / FILE).read_bytes()))
    data["links"]["2x4"] = {"collectives": []}
    (tmp_path / FILE).write_bytes(gzip.compress(json.dumps(data).encode()))
    with pytest.raises(TensorOptError, match=r"is damaged .*; explore again"):
        read_recorded((tmp_path / FILE).read_bytes(), tmp_path / FILE)
