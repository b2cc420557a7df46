"""How long it will take: from runs that asked the same, else from their like, else nothing."""

from __future__ import annotations

from typing import Any

from tensoropt_app.jobs.estimate import REPEATED, CompletedJob, estimate, request_key
from tensoropt_app.views.jobs import estimate_words

from tensoropt import Settings, load_cluster
from tensoropt.question.question import Question


def of(**more: Any) -> dict[str, Any]:
    return Question(**{"model": "zoo:mlp", "cluster": "dgx-h100", **more}).data()


def test_clusters_and_constraints_count_by_their_content():
    pins = {"together": [["*attn*"]]}
    described = load_cluster("dgx-h100[2]").to_dict()
    first, same = (
        request_key(of(cluster=dict(described), settings=Settings(constraints=pins), constraints_file=name))
        for name in ("a.yaml", "b.yaml")
    )
    assert first == same
    assert first.core != request_key(of(cluster=load_cluster("dgx-h100[4]").to_dict())).core
    assert first.whole != request_key(of(cluster=described)).whole


def test_settings_of_the_search_make_it_alike_and_the_model_does_not():
    wanted = request_key(of())
    finer = CompletedJob(request_key(of(settings=Settings(epsilon=0))), 40.0)
    batch = CompletedJob(request_key(of(batch=8)), 3.0)
    beside = CompletedJob(request_key(of(planners=("zero",))), 3.0)
    trained = CompletedJob(request_key(of(settings=Settings(mode="inference"))), 3.0)
    assert estimate(wanted, [batch, beside, trained]) is None
    found = estimate(wanted, [batch, finer])
    assert (found.last_s, found.same) == (40.0, False)
    assert "with other settings, took that last time" in estimate_words(found)


def test_the_newest_is_the_estimate_and_the_range_is_said():
    wanted = request_key(of())
    took = 12.0, 30.0, *[20.0] * REPEATED, 900.0
    found = estimate(wanted, [CompletedJob(wanted, seconds) for seconds in took])
    assert (found.last_s, found.low_s, found.high_s) == (12.0, 12.0, 30.0)
    assert estimate_words(found) == ("The same took 12 s to 30 s in 12 runs; saved results are reused.")
    assert estimate_words(None).startswith("No estimate yet")
