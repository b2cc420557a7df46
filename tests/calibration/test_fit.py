"""The fit of residual terms: what made the steps is found, and what disturbed some of them is not."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tensoropt.calibration.fit import Equation, Run, fit_residuals, fit_terms
from tensoropt.costs.residuals import BYTE, COLLECTIVE, EDGES, FAMILIES, factor_of_class, factor_of_kind

PRODUCT, REDUCE = factor_of_class("matrix product"), factor_of_kind("all_reduce")
TRUE = {PRODUCT: 1.3, REDUCE: 0.8, EDGES: 1.1, COLLECTIVE: 3e-4}


def run(rng: random.Random, model: str, *, slow: float = 1.0, cores_busy: float = 0.0) -> Run:
    """A step whose parts are drawn, and which takes what ``TRUE`` says, times ``slow``."""
    by = {PRODUCT: rng.uniform(0.02, 0.2), REDUCE: rng.uniform(0.01, 0.1), EDGES: rng.uniform(0.001, 0.05)}
    raw = sum(by.values())
    by[COLLECTIVE] = rng.randint(1, 60)
    equation = Equation(0.0, raw, by)
    return Run(model, Equation(slow * equation.at(TRUE), raw, by), None, (), cores_busy)


@pytest.fixture
def runs() -> list[Run]:
    rng = random.Random(3)
    return [run(rng, f"model {number % 5}") for number in range(40)]


def test_a_prediction_is_linear_in_its_terms():
    equation = Equation(1.0, 0.5, {PRODUCT: 0.3, BYTE: 10.0})
    assert equation.at({}) == 0.5
    assert equation.at({PRODUCT: 2.0}) == pytest.approx(0.8)
    assert equation.at({PRODUCT: 0.5, BYTE: 1e-3}) == pytest.approx(0.5 - 0.15 + 0.01)


def test_terms_that_made_the_steps_are_found(runs):
    found = fit_terms(runs, tightness=0.1)
    for term, value in TRUE.items():
        assert found[term] == pytest.approx(value, rel=0.05), term
    of_families = {term for family in FAMILIES if not family.isdisjoint(TRUE) for term in family}
    assert found.keys() == TRUE.keys() | of_families


def test_a_class_that_no_run_had_takes_what_others_take():
    seen = [Run("m", Equation(1.3, 1.0, {term: 1.0}), None, ()) for term in sorted(FAMILIES[0])[:4]]
    found = fit_terms(seen * 5)
    unseen = sorted(FAMILIES[0])[4]
    assert found[unseen] == pytest.approx(1.28, abs=0.03)
    assert found[sorted(FAMILIES[0])[0]] == pytest.approx(1.3, abs=0.03)
    # What a model's own runs say of one class says nothing of others.
    assert fit_terms(seen[:1], start={unseen: 1.1}).keys() == {sorted(FAMILIES[0])[0]}


def test_a_step_that_was_disturbed_counts_little(runs):
    rng = random.Random(5)
    found = fit_terms([*runs, *(run(rng, "other", slow=8.0) for _ in range(4))], tightness=0.1)
    assert found[PRODUCT] == pytest.approx(TRUE[PRODUCT], rel=0.15)


def test_terms_stay_near_where_they_began_without_steps_that_say_otherwise():
    alone = Run("m", Equation(1.0, 1.0, {PRODUCT: 1.0, EDGES: 1e-6}), None, ())
    assert fit_terms([alone])[PRODUCT] == pytest.approx(1.0, abs=1e-3)
    assert fit_terms([alone], start={EDGES: 1.7})[EDGES] == pytest.approx(1.7, abs=1e-3)
    assert fit_terms([]) == {}


def test_the_error_is_that_of_models_that_were_left_out(runs):
    found = fit_residuals(runs)
    assert found.error < 0.02 < found.raw_error
    assert found.low < 1.0 + 0.02
    assert found.high > 1.0 - 0.02
    assert (found.steps, found.disturbed, len(found.models)) == (40, 0, 5)
    # One model of another machine: predicted as badly as it would be by the others.
    rng = random.Random(7)
    odd = fit_residuals([*runs, *(run(rng, "odd", slow=3.0) for _ in range(12))])
    assert odd.worst > 0.5


def test_the_range_is_of_steps_as_they_ran(runs):
    """Four of five as the terms say, and one of five half as long again."""
    slow = [replace(r, step=replace(r.step, measured_s=1.5 * r.step.measured_s)) for r in runs[::4]]
    found = fit_residuals([*runs, *slow])
    assert found.low == pytest.approx(1.0, abs=0.1)
    assert found.high == pytest.approx(1.5, abs=0.1)


def test_what_other_programs_disturbed_is_left_out_unless_it_is_most(runs):
    rng = random.Random(9)
    disturbed = [run(rng, "model 1", slow=10.0, cores_busy=1.5) for _ in range(10)]
    assert fit_residuals([*runs, *disturbed]) == fit_residuals(runs)
    few = fit_residuals([*runs[:5], *disturbed])
    assert (few.steps, few.disturbed) == (15, 10)
    assert "while other programs used the machine" in few.words


def test_runs_are_plain_data(runs):
    network = Run("m", runs[0].step, runs[1].step, (runs[2].step,), 0.7)
    for one in (runs[0], network):
        assert Run.from_record(json.loads(json.dumps(one.to_record()))) == one
