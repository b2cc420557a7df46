"""Tuning: what is faster as measured is kept, what is slower rolled back."""

from __future__ import annotations

import sys

import pytest

from tensoropt import TensorOptError, explore, load_model, load_plan
from tensoropt.plan.keys import plan_key
from tensoropt.profiling.store import ProfileStore
from tensoropt.tuning import tune as tuning
from tensoropt.tuning.tune import FILE, PLAN, Tuning, _end_of, tune


@pytest.fixture(scope="module")
def explored(tmp_path_factory):
    """An exploration of two CPU ranks, priced without timing anything."""
    loaded = load_model("zoo:mlp", batch=32)
    with ProfileStore(tmp_path_factory.mktemp("store") / "p.sqlite") as store:
        return explore(loaded, cluster="local:2", measure="never", placements="never", store=store)


@pytest.fixture
def folder(explored, tmp_path):
    explored.save(tmp_path / "mlp")
    return tmp_path / "mlp"


class Machine:
    """A stand-in for ranks: what each plan takes, and which candidates planning again brings.

    Args:
        seconds: of plans by index.
        candidates: indices, in order; then none.
    """

    def __init__(self, explored, monkeypatch, seconds, candidates):
        self.plans = {i: explored.plan(i) for i in {*seconds, *candidates}}
        self.seconds = {plan_key(self.plans[i]): s for i, s in seconds.items()}
        self.candidates, self.ran = list(candidates), []
        machine = self

        def measured(self, plans):
            machine.ran.append([plan_key(plan) for plan in plans])
            return [machine.seconds[plan_key(plan)] for plan in plans]

        def best(self, memory_bytes, state):
            if machine.candidates:
                return machine.plans[machine.candidates.pop(0)]
            state.done = "nothing is faster"
            return None

        monkeypatch.setattr(tuning._Tuner, "_measured", measured)
        monkeypatch.setattr(tuning._Tuner, "_best", best)


def decisions(found: Tuning) -> list[str]:
    return [one["decision"] for one in found.decisions]


def test_the_faster_is_kept_and_the_slower_rolled_back(explored, folder, store, monkeypatch):
    last = len(explored.points) - 1
    Machine(explored, monkeypatch, {last: 0.3, 0: 0.5, 1: 0.2}, [0, 1])
    said: list[str] = []
    found = tune(folder, store=store, say=said.append)
    assert decisions(found) == ["begin", "roll back", "keep", "end"]
    assert plan_key(found.plan) == plan_key(explored.plan(1))
    assert (found.begun_s, found.measured_s, found.done) == (0.3, 0.2, "nothing is faster")
    assert plan_key(load_plan(folder / PLAN)) == plan_key(found.plan)
    assert len(said) == len(found.decisions)
    assert "(300 ms), 66.7% slower" in found.decisions[1]["why"]


@pytest.mark.parametrize(("gain", "drift", "why", "other"), [
    (0.02, 0.01, "predictions are within 3% (off by 1.0%)", "2.0% faster"),
    (-0.1, 0.01, "predictions are within 3% (off by 1.0%)", "10.0% slower"),
    (-0.3, 0.22, "no candidate is left: predictions are off by 22.0%", "30.0% slower"),
])  # fmt: skip
def test_it_ends_with_right_predictions_or_without_a_candidate(gain, drift, why, other):
    assert _end_of(gain, drift) == f"{why}, and the best other plan is predicted to be {other}"


@pytest.mark.parametrize(("gain", "drift"), [(0.04, 0.01), (0.01, 0.22), (-0.1, 0.22)])
def test_it_goes_on_with_what_may_be_faster(gain, drift):
    assert not _end_of(gain, drift)


def test_no_more_candidates_are_tried_than_asked_for(explored, folder, store, monkeypatch):
    last = len(explored.points) - 1
    Machine(explored, monkeypatch, {last: 0.3, 0: 0.5, 1: 0.5}, [0, 1])
    found = tune(folder, store=store, rounds=1)
    assert decisions(found) == ["begin", "roll back", "end"]
    assert found.done.startswith("1 candidate was tried, as many as asked for, with predictions off by")


def test_it_begins_with_the_point_or_plan_that_is_named(explored, folder, store, monkeypatch):
    Machine(explored, monkeypatch, {0: 0.3}, [])
    assert plan_key(tune(folder, point=1, store=store).plan) == plan_key(explored.plan(0))
    explored.plan(0).save(folder / "mine.json")
    assert plan_key(tune(folder / "mine.json", store=store).plan) == plan_key(explored.plan(0))


def test_what_cannot_be_tuned_is_refused(explored, folder, store, tmp_path):
    with pytest.raises(TensorOptError, match="no point 999"):
        tune(folder, point=999, store=store)
    explored.plan(0).save(tmp_path / "alone.json")
    with pytest.raises(TensorOptError, match="no exploration beside it"):
        tune(tmp_path / "alone.json", store=store)


SCRIPT = """
import sys, torch, tensoropt
loaded = tensoropt.load_model("zoo:mlp", batch=32)
model = tensoropt.parallelize(loaded.model, sys.argv[1], tune=True)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(20):
    model(*loaded.args, **loaded.kwargs).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_the_users_own_training_is_what_is_timed(folder, store, tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = tune(folder, store=store, rounds=1, job=[*run, str(script), "{plan}"])
    assert found.measured_s > 0
    assert found.done
    # Of both ranks; standard output stays free for answers.
    out, err = capfd.readouterr()
    assert "trained" not in out
    assert err.count("trained") >= 2


def test_a_job_that_fails_decides_nothing(explored, folder, store):
    with pytest.raises(TensorOptError, match="does not name the plan's file"):
        tune(folder, store=store, job=["true"])
    with pytest.raises(TensorOptError, match="cannot be run"):
        tune(folder, store=store, job=["no-such-program", "{plan}"])
    with pytest.raises(TensorOptError, match="ended with code 3"):
        tune(folder, store=store, job=[sys.executable, "-c", "raise SystemExit(3)", "{plan}"])
    with pytest.raises(TensorOptError, match="wrote no"):
        tune(folder, store=store, job=[sys.executable, "-c", "", "{plan}"])
    assert not (folder / FILE).exists()


@pytest.mark.slow
def test_a_real_tuning_learns_what_steps_take(folder, store):
    found = tune(folder, store=store, rounds=1)
    assert found.measured_s > 0
    assert found.decisions[0]["decision"] == "begin"
    assert found.done
    # The machine's own prices stay as they are.
    assert not list(store.items("calibration"))
