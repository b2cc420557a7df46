"""What is changed, how many changes are tried, and which tests should notice.

The order of tests does not matter: each target's tests are timed first, and run quickest first, those that
execute the changed line before the others. A mutant survives only when all of them pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.mutants.mutant import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Files that are changed and tests that should notice.

    Attributes:
        files: patterns below the folder ``below``, of whole stages where they are of one kind, so that a
            file that is renamed or new is changed, too.
        tests: files and folders below ``tests/``.
        sample: how many of the generated mutants are tried.
        jit: False where kernels are changed, or what is compiled into them: numba's cache of a caller does
            not notice that what it calls has changed.
        ranks: whether tests that start ranks are among them.
    """

    name: str
    files: Sequence[str]
    tests: Sequence[str]
    sample: int
    jit: bool = True
    ranks: bool = False
    below: str = "tensoropt"

    @property
    def sources(self) -> list[str]:
        found = {p for pattern in self.files for p in (ROOT / self.below).glob(pattern)}
        return [str(p.relative_to(ROOT)) for p in sorted(found) if p.read_text(encoding="utf-8").strip()]

    @property
    def test_files(self) -> list[str]:
        return [f"tests/{name}" for name in self.tests]


TARGETS = (
    Target(
        name="frontier", files=["frontier/*.py"], tests=["frontier", "search/test_exhaustive.py"], sample=40,
        jit=False,
    ),
    Target(
        name="search kernels",
        files=[f"search/{name}.py" for name in ("hull", "engine", "result")],
        tests=[
            "frontier/test_kernels.py",
            "search/test_result.py",
            *(f"search/test_{name}.py" for name in ("bounds", "oracle", "exhaustive", "wild_costs")),
        ],
        sample=60, jit=False,
    ),
    Target(
        name="search",
        files=["search/entangled/*.py", *(f"search/{name}.py" for name in (
            "bounds", "flat_tables", "order", "paper", "program", "reduced_graph", "shared", "sources",
            "track", "within",
        ))],
        tests=["search"], sample=60,
    ),
    Target(
        name="simulation", files=["simulate/*.py", "evaluation/evaluate.py"],
        tests=["simulate", "evaluation/test_problem.py"], sample=60,
    ),
    Target(
        name="export", files=["exploration/export.py"],
        tests=[
            "exploration/test_export.py", "exploration/test_exploration.py", "placement/test_points.py",
            "pipeline/test_points.py",
        ],
        sample=12,
    ),
    Target(
        name="costs",
        files=[
            "costs/*.py", "profiling/facts.py", "profiling/link_fits.py", "sharding/reshard/steps.py",
        ],
        tests=[
            "costs", *(f"profiling/test_{name}.py" for name in ("link_fits", "links", "overheads", "facts")),
            "sharding/reshard", "simulate/test_collectives.py", "simulate/test_simulator.py",
        ],
        sample=60,
    ),
    Target(
        name="gradients",
        files=["engine/gradients.py", "sharding/buckets*.py", "sharding/reshard/redistribute.py"],
        tests=[
            "engine/test_gradients.py", "sharding/test_buckets.py", "sharding/reshard",
            "verify/test_fake_ranks.py", "execute/test_parallel.py",
        ],
        sample=8, ranks=True,
    ),
    Target(
        name="verify", files=["verify/*.py"],
        tests=["engine/test_replicas.py", *(f"verify/test_{name}.py" for name in (
            "answer", "fake_ranks", "gpu_checks", "onnx_file", "predict", "random_strategies", "reference",
            "verify",
        ))],
        sample=8, ranks=True,
    ),
    Target(
        name="facts", files=["profiling/fact_finding.py", "profiling/facts_of_kinds.py"],
        tests=[f"profiling/test_{name}.py" for name in ("fact_finding", "facts", "facts_of_kinds")],
        sample=16,
    ),
    Target(
        name="lowering", files=["engine/lower.py", "engine/calls.py", "sharding/program.py"],
        tests=["engine", "sharding/test_program.py", "verify/test_fake_ranks.py"], sample=12, ranks=True,
    ),
    Target(
        name="pipelines", files=["pipeline/*.py"], sample=36,
        tests=["pipeline", "session/test_pipelines.py", "planners/test_pinned_pipeline.py"],
    ),
    Target(name="placements", files=["placement/*.py"], tests=["placement"], sample=30),
    Target(
        name="answer",
        files=[
            "exploration/*.py", "plan/needs.py", "plan/plan_names.py", "plan/point.py",
            "session/quick_plans.py", "report/detail.py", "report/step_parts.py",
        ],
        tests=["exploration", "plan", "report", "session/test_quick_plans.py"], sample=36,
    ),
    Target(name="capture", files=["capture/*.py", "capture/blocks/*.py"], tests=["capture"], sample=36),
    Target(name="command line", files=["cli/*.py", "question/*.py"], tests=["cli", "question"], sample=24),
    Target(
        name="page", files=["views/*.py", "figures/*.py"],
        tests=["app/views", "app/figures", "app/test_same_figures.py"], sample=24, below="app",
    ),
)  # fmt: skip

EQUAL_RESULTS = {
    "tensoropt/search/shared.py": (
        "_FEW_SUMS", "_MORE_SUMS", "FEW_LINES", "LINES", "CORNERS", "MORE_LINES", "_MESSAGE_BYTES",
    ),
    "tensoropt/search/within.py": (
        "_MOST_LINES", "_WORTH_NARROWING", "_FEW_PAIRS", "_TARGETED_PAIRS", "_MOST_POINTS", "_FAR",
        "_LAST_PAIRS", "_LARGE_WORK", "_THOROUGH", "_SUMS", "_WIDE", "_CLOSER", "_CLOSENESS",
    ),
    "tensoropt/search/engine.py": ("_BREAKPOINTS", "_NEIGHBOURS"),
}  # fmt: skip
"""Constants at module level that decide how long a search takes and not what it finds, so that no test of
results can notice a change: those of ``shared.py`` say how fine bounds are; those of ``within.py`` how much
is spent on proving a gap; those of ``engine.py`` at how many memories a limit is known, and how many corners
share a roof."""
