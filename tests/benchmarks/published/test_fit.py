"""Known shares are found again, a held-out source says nothing of its own prediction, parts add up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tensoropt.profiling.store import ProfileStore
from tests.benchmarks.published import fit as fitting
from tests.benchmarks.published import parts as kinds
from tests.benchmarks.published.parts import RunParts, StepParts
from tests.benchmarks.published.shares import Fit, Runs, deviation_of, fit, shares_of
from tests.benchmarks.published.test_published import GPT, PIPED, run, small

KNOWN = {"products 8.0": 0.7, "FlashAttention 2": 0.45, "memory 8.0": 0.8}


def made(source: str, number: int, factor: float = 1.0) -> RunParts:
    """A run of which products, attention, memory and what is beside operators take shares that vary."""
    draw = np.random.default_rng(number)
    product, attention, memory, waited = draw.uniform(0.2, 1.0, 4).tolist()
    kernels = [
        ("matrix product", product, 0.0, 2.0),
        ("attention", attention, 0.0, 1.0),
        ("element-wise", 0.0, 0.5 * memory, 1.0),
    ]
    seconds = dict.fromkeys(fitting.TERMS[:-2], 0.0) | {kinds.DATA: 0.2 * waited}
    one = RunParts(
        id=f"{source}-{number}", source=source, date="2024-01", gpu="A100-80GB", capability="8.0",
        cluster="A100-80GB x 8", model="small", published_s=1.0, simulated_s=1.0,
        simulated_at=(0.6, 0.4, 0.7), steps=[StepParts(1.0, kernels, seconds, bubble=0.1)],
    )  # fmt: skip
    runs = Runs([one])
    (true_s,), (simulated_s,) = runs.seconds(runs.at(KNOWN.__getitem__)), runs.seconds(runs.simulated_at)
    return replace(one, published_s=factor * float(true_s), simulated_s=float(simulated_s))


def sources(count: int, each: int = 4) -> list[RunParts]:
    return [made(f"source {of}", 100 * of + number) for of in range(count) for number in range(each)]


def test_known_shares_are_found_again():
    fitted = fit(sources(6))
    for name, share in KNOWN.items():
        assert fitted.of(name) == pytest.approx(share, rel=0.06)  # drawn to what is assumed
    assert fitted.deviation < 0.01
    assert all(factor == pytest.approx(1.0, abs=0.01) for factor in fitted.factors.values())


def test_a_well_tuned_source_is_a_factor_and_leaves_the_shares_to_the_others():
    found = sources(6) + [made("tuned", 1000 + number, factor=0.8) for number in range(40)]
    fitted = fit(found)
    assert fitted.of("products 8.0") == pytest.approx(KNOWN["products 8.0"], rel=0.05)
    assert fitted.factors["tuned"] < 0.9 < min(fitted.factors[f"source {of}"] for of in range(6))


def test_a_held_out_source_does_not_influence_its_own_prediction():
    found = sources(3)
    slower = [replace(r, published_s=9 * r.published_s) if r.source == "source 1" else r for r in found]
    before, after = ({row["id"]: row for row in fitting.left_out(of)} for of in (found, slower))
    for name, row in before.items():
        same = row["predicted_step_s"] == after[name]["predicted_step_s"]
        assert same is row["id"].startswith("source 1"), name


def test_what_no_run_was_fitted_to_is_as_assumed():
    assert Fit().of("products 12.0") == 0.55
    assert shares_of(made("x", 0)) == tuple(KNOWN)


def test_a_range_is_as_wide_as_sources_lie_apart():
    names = [f"{of}" for of in range(400)]
    ratios = np.exp(np.random.default_rng(0).normal(0.0, 0.1, 400))
    spread = Fit(deviation=deviation_of(names, ratios))
    assert spread.factor(0.5) == 1.0
    held = np.mean((ratios > spread.factor(0.1)) & (ratios < spread.factor(0.9)))
    assert held == pytest.approx(0.8, abs=0.05)
    # Rows of one source are no further sources.
    assert deviation_of(["a"] * 50 + ["b", "c"], np.array([1.2] * 50 + [1.0, 1.0])) > 0.1


def test_ranges_come_from_the_other_sources():
    found = [replace(r, published_s=r.simulated_s) for r in sources(4)]
    assert all(row["held"] for row in fitting.as_priced(found))
    odd = [*found, *(replace(r, source="odd", published_s=2 * r.simulated_s) for r in found[:3])]
    assert [row["held"] for row in fitting.as_priced(odd) if row["source"] == "odd"] == [False] * 3


def test_pairs_are_configurations_of_one_model_on_one_cluster():
    def row(predicted, published, **changed):
        of = {"source": "x", "model": "m", "cluster": "c"}
        return of | {"predicted_step_s": predicted, "published_step_s": published, "held": True} | changed

    rows = [row(1.0, 1.0), row(1.1, 1.2), row(0.9, 1.5), row(9.0, 1.01), row(1.0, 2.0, cluster="d")]
    # 1.0 beside 1.01 is no pair; the third is wrong to both others, the fourth to the second and third.
    assert fitting.ordered(rows) == (1, 5)
    assert fitting.summary(rows)["pairs"] == 5


def test_a_term_that_is_left_out_is_reported():
    found = sources(3)
    terms = {of["term"]: of for of in fitting.terms_of(found, fitting.summary(fitting.left_out(found)))}
    assert terms[kinds.BUBBLE]["mean_share"] == pytest.approx(1 - 1 / 1.1)
    assert terms[kinds.DATA]["median_error_without"] > terms[kinds.SLOWER]["median_error_without"]
    assert terms[kinds.HOST]["mean_share"] == terms[kinds.SLOWER]["mean_share"] == 0.0
    result = fitting.results_of(found)
    assert result["held_out"]["runs"] == len(found)
    assert "products 8.0" in fitting.shares_yaml(fit(found)) == result["fit"]


@pytest.mark.sweep
@pytest.mark.parametrize("how", [{}, PIPED, {"recompute": "full", "framework": "NeMo", "date": "2025-01"}])
def test_parts_add_up_to_the_simulated_step(how, tmp_path):
    _, models = small(GPT, 32)
    with ProfileStore(":memory:") as store:
        parts = kinds.parts_of(run(**how), models, store)
    runs = Runs([parts])
    assert runs.seconds(runs.simulated_at) == pytest.approx([parts.simulated_s])
    kinds.keep_parts(parts, tmp_path / "parts.jsonl")
    assert kinds.load_parts(tmp_path / "parts.jsonl") == {parts.id: parts}
    assert kinds.load_parts(tmp_path / "none.jsonl") == {}
