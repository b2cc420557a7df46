"""A script's own loop by a plan, beside the same in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tensoropt.ranks.pool import RankPool
from tests.integrations import loop_jobs as jobs
from tests.integrations.planned import KINDS, close, ran_by


@pytest.mark.distributed
def test_trains_as_one_process_does(ranks: RankPool, alone: Any, tmp_path: Path) -> None:
    close(ran_by(jobs.__file__, "briefly_trained", tmp_path, "data", ranks), alone("briefly_trained"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_trains_and_continues_as_one_process_does(
    kind: str, ranks: RankPool, alone: Any, tmp_path: Path
) -> None:
    """Losses, norms, rates and evaluations of 54 steps, an average, and a run from the middle again."""
    found = ran_by(jobs.__file__, "trained", tmp_path, kind, ranks)
    assert (len(found["first"]["norms"]), len(found["again"]["norms"])) == (3 * jobs.EPOCHS, 27)
    close(found, alone("trained"))
