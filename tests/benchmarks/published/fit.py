"""Shares of a data sheet's peaks fitted to published runs, and tested on sources that the fit has not seen.

    python -m tests.benchmarks.published.fit --runs FILE.csv --models FILE.yaml --parts FILE.jsonl
        [--core] [--out DIR]

Each run that FILE.jsonl lacks is simulated once and kept there in parts, which takes seconds to a minute a
run; a fit takes less than a second. For every source in turn the shares are fitted to the others
(:mod:`tests.benchmarks.published.shares`) and tested on it, and so is the range in which 80 % of jobs are
said to lie. Printed are the errors and the fit to all, as ``presets/efficiencies.yaml`` has it; ``--out``
also writes DIR/DATE-held-out-sources.{json,md}.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tensoropt.errors import TensorOptError
from tensoropt.profiling.store import ProfileStore
from tests.benchmarks.machine import Taking, dated, described, write
from tests.benchmarks.program import Row, page, table
from tests.benchmarks.published import parts
from tests.benchmarks.published.parts import RunParts, keep_parts, load_parts, parts_of
from tests.benchmarks.published.report import fitted_sources
from tests.benchmarks.published.runs import RefusedRunError, load_models, load_runs, pinned_of
from tests.benchmarks.published.shares import Fit, Runs, deviation_of, fit

HOLDS = 0.8
"""The share of jobs that a range is to hold."""
APART = 0.05
"""By how much published steps differ whose order is compared."""
TERMS = (
    parts.LAUNCHES, parts.OPTIMIZER, parts.COPIES, parts.SLOWER, *parts.WAITS, parts.BUBBLE, parts.HOST,
)  # fmt: skip


def left_out(found: Sequence[RunParts], terms: Mapping[str, float] | None = None) -> list[Row]:
    """A row per run, predicted by shares fitted to the other sources.

    Args:
        terms: factors on what is beside operators, by name.
    """
    rows = []
    for source in dict.fromkeys(run.source for run in found):
        fitted = fit([run for run in found if run.source != source], terms)
        own = Runs([run for run in found if run.source == source])
        rows += _rows(own, own.seconds(own.at(fitted.of), terms), fitted)
    return rows


def as_priced(found: Sequence[RunParts]) -> list[Row]:
    """A row per run as shares of ``presets/efficiencies.yaml`` have it, with the range that other sources'
    errors give."""
    rows = []
    for source in dict.fromkeys(run.source for run in found):
        others = Runs([run for run in found if run.source != source])
        spread = deviation_of(others.sources, others.published_s / others.simulated_s)
        own = Runs([run for run in found if run.source == source])
        rows += _rows(own, own.simulated_s, Fit(deviation=spread))
    return rows


def _rows(runs: Runs, predicted_s: np.ndarray, fitted: Fit) -> list[Row]:
    low, high = fitted.factor((1 - HOLDS) / 2), fitted.factor((1 + HOLDS) / 2)
    return [
        {
            **{name: getattr(run, name) for name in ("id", "source", "model", "cluster")},
            "predicted_step_s": float(seconds),
            "published_step_s": run.published_s,
            "held": bool(low * seconds <= run.published_s <= high * seconds),
        }
        for run, seconds in zip(runs.runs, predicted_s, strict=True)
    ]


def ordered(rows: Iterable[Row]) -> tuple[int, int]:
    """How many pairs are predicted in the right order, and how many there are: rows of one source, model and
    cluster whose steps differ by more than :data:`APART`."""
    right = pairs = 0
    for one, other in itertools.combinations(rows, 2):
        if any(one[name] != other[name] for name in ("source", "model", "cluster")):
            continue
        apart = np.log(one["published_step_s"] / other["published_step_s"])
        if abs(apart) > np.log(1 + APART):
            pairs += 1
            right += bool(np.log(one["predicted_step_s"] / other["predicted_step_s"]) * apart > 0)
    return right, pairs


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """How many rows, the median, 90th percentile and worst of their errors, the median of predicted over
    published, the share held by ranges, and pairs in the right order."""
    ratios = np.array([row["predicted_step_s"] / row["published_step_s"] for row in rows])
    errors = np.abs(ratios - 1)
    right, pairs = ordered(rows)
    return {
        "runs": len(rows),
        "median_error": float(np.median(errors)),
        "percentile_90_error": float(np.quantile(errors, 0.9)),
        "worst_error": float(errors.max()),
        "median_ratio": float(np.median(ratios)),
        "held": float(np.mean([row["held"] for row in rows])),
        "pairs": pairs,
        "pairs_in_order": right,
    }


def by_source(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The summary of each source's rows."""
    sources = dict.fromkeys(row["source"] for row in rows)
    return {source: summary([row for row in rows if row["source"] == source]) for source in sources}


def terms_of(found: Sequence[RunParts], errors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each term beside operators is of a step, and the errors of held-out sources without it."""
    runs, rows = Runs(found), []
    for name in TERMS:
        without = summary(left_out(found, {name: 0.0}))
        # Rounded, so that nothing is a little less than nothing.
        share = np.round(1 - runs.seconds(runs.simulated_at, {name: 0.0}) / runs.simulated_s, 9) + 0.0
        row = {"term": name, "mean_share": float(share.mean()), "largest_share": float(share.max())}
        row |= {f"{key}_without": without[key] for key in ("median_error", "percentile_90_error")}
        rows.append(row | {"median_error_gained": without["median_error"] - errors["median_error"]})
    return rows


def shares_yaml(fitted: Fit) -> str:
    """The fit to all sources: shares by name, and the range around them."""
    well_tuned, slow = (round(fitted.factor((1 + sign * HOLDS) / 2), 3) for sign in (-1, 1))
    spread = {"well_tuned": well_tuned, "slow": slow, "holds": HOLDS}
    shares = {name: round(share, 3) for name, share in sorted(fitted.shares.items())}
    factors = {source: round(factor, 3) for source, factor in fitted.factors.items()}
    return yaml.safe_dump({"shares": shares, "factors": factors, "spread": spread}, sort_keys=False)


def markdown(data: Mapping[str, Any]) -> str:
    """The result for people."""
    held = data["held_out"]
    of_priced = [
        ("all", data["priced"]),
        ("all but those fitted to", data["priced_held_out"]),
        ("the same, at the shares fitted to all other sources", data["held_out_of_these"]),
        *data["priced_by_source"].items(),
    ]
    return page(
        f"# Published runs of sources that no share was fitted to, {data['date']}",
        (
            "Shares of peaks were fitted to all sources but one and tested on that one, for every source in",
            "turn. An error is |predicted / published - 1|; a range is to hold 80 % of the jobs of a source",
            "that was not seen. Pairs are two configurations of one model on one cluster whose published",
            "steps differ by more than 5 %. Predictions from data sheets do not depend on the load.",
        ),
        f"Taken from {described(data)}.",
        table(_TITLES, [_cells("all", held), *starmap(_cells, data["held_out_by_source"].items())]),
        (
            "The same runs at the shares that plans are priced with (`presets/efficiencies.yaml`), ranges",
            "from the errors of the other sources. These shares were fitted to",
            f"{', '.join(data['fitted_to'])}.",
        ),
        table(_TITLES, starmap(_cells, of_priced)),
        (
            "What each term beside operators is of a step, and the errors of held-out sources if it is left",
            f"out and shares are fitted without it; with all of them {held['median_error']:.1%} and "
            f"{held['percentile_90_error']:.1%}.",
        ),
        table(
            ["term", "mean share", "largest", "median error without", "90th percentile without"],
            (
                [of["term"], f"{of['mean_share']:.1%}", f"{of['largest_share']:.0%}",
                 f"{of['median_error_without']:.1%}", f"{of['percentile_90_error_without']:.1%}"]
                for of in data["terms"]
            ),
        ),
        "Fitted to all sources; a factor is published over simulated:",
        ("```yaml", data["fit"].rstrip(), "```"),
        "Refused:" if data["refused"] else "",
        [f"- {name}: {why}" for name, why in data["refused"].items()],
    )  # fmt: skip


_TITLES = (
    "runs", "predicted", "median error", "90th percentile", "worst", "median of predicted / published",
    "in their range", "pairs in order",
)  # fmt: skip


def _cells(name: str, of: Mapping[str, Any]) -> list[str]:
    errors = f"{of['median_error']:.1%}", f"{of['percentile_90_error']:.1%}", f"{of['worst_error']:.0%}"
    pairs = f"{of['pairs_in_order']} of {of['pairs']}" if of["pairs"] else ""
    return [name, of["runs"], *errors, f"{of['median_ratio']:.2f}", f"{of['held']:.0%}", pairs]


def results_of(found: Sequence[RunParts]) -> dict[str, Any]:
    """Errors of held-out sources and of the shares that plans are priced with, terms, and the fit to all."""
    rows, priced, fitted_to, runs = left_out(found), as_priced(found), fitted_sources(), Runs(found)
    spread = Fit(deviation=deviation_of(runs.sources, runs.published_s / runs.simulated_s))

    def others(of: Sequence[Row]) -> list[Row]:
        return [row for row in of if row["source"] not in fitted_to]

    held = summary(rows)
    return {
        "held_out": held,
        "held_out_by_source": by_source(rows),
        "fitted_to": fitted_to,
        "priced": summary(priced),
        "priced_held_out": summary(others(priced)),
        "held_out_of_these": summary(others(rows)),
        "priced_by_source": by_source(priced),
        "terms": terms_of(found, held),
        "fit": shares_yaml(fit(found)),
        "spread_as_priced": shares_yaml(spread),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="CSV, a row per run")
    parser.add_argument("--models", type=Path, required=True, help="YAML, the numbers of each model")
    parser.add_argument("--parts", type=Path, required=True, help="where simulated runs are kept in parts")
    parser.add_argument("--core", action="store_true", help="only rows that say core=yes, a balanced subset")
    parser.add_argument("--out", type=Path, help="folder of the results")
    options = parser.parse_args()
    taking = Taking()
    runs = [run for run in load_runs(options.runs) if run.core or not options.core]
    models, known, refused = load_models(options.models), load_parts(options.parts), {}
    options.parts.parent.mkdir(parents=True, exist_ok=True)
    with ProfileStore(options.parts.with_suffix(".sqlite")) as store:
        for number, run in enumerate(runs, 1):
            if run.id in known:
                continue
            try:
                pinned_of(run)  # refused before the model is looked for
                known[run.id] = parts_of(run, models, store)
            except (RefusedRunError, TensorOptError) as refusal:
                refused[run.id] = str(refusal)
                continue
            finally:
                gc.collect()  # graphs of thousands of operators lie in cycles
            keep_parts(known[run.id], options.parts)
            print(f"{number}/{len(runs)} {run.id} simulated", flush=True)
    data = {
        **taking.about,
        **results_of([known[run.id] for run in runs if run.id in known]),
        "runs": options.runs.name,
        "refused": refused,
        "taken": taking.part(),
    }
    words = markdown(data)
    if options.out:
        write(dated("published", "held-out-sources", out=options.out), data, words)
    print(words)
    print("\nThe range around the shares that plans are priced with:\n")
    print(data["spread_as_priced"])


if __name__ == "__main__":
    main()
