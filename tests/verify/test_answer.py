"""The answer of ``verify``: its keys are fixed, and what decides ``ok``.

What ranks issue together is the same on all of them; the first difference is named.
"""

import json
from dataclasses import replace

import pytest

from tensoropt.cli.verify import verify_text
from tensoropt.engine.models import load_model
from tensoropt.ops.calls import BY_VALUES, RING_SEND
from tensoropt.verify.agreement import JointCall, disagreements
from tensoropt.verify.answer import answer_of, entry_of
from tensoropt.verify.findings import Differences, RunFindings
from tensoropt.verify.predict import Place, Prediction
from tensoropt.verify.reference import ModuleFindings
from tests.execute import jobs

KEYS = [
    "ok", "mesh", "micro_batches", "schedule", "loss_difference", "gradient_difference", "worst_gradient",
    "parameter_difference", "worst_parameter", "buffer_difference", "not_finite", "replicas_agree",
    "replica_difference", "unsplit_on", "compared_in", "narrow", "ranks_checked", "memory_tracked_bytes",
    "memory_allocated_bytes", "memory_reserved_bytes", "memory_tracked",
    "memory_tracked_of_ranks", "time_measured_s", "error", "collectives_predicted",
    "collectives_issued", "collectives_unlike", "collectives_in_order", "order_unlike", "memory_unlike",
    "memory_predicted_bytes", "memory_predicted_of_places", "time_predicted_s",
]  # fmt: skip
SENT = {"kind": "all_reduce", "axes": [1], "bytes": 8, "count": 1}
PREDICTED = Prediction([SENT | {"axes": [0]}], 100.4, 0.5)
RIGHT = RunFindings(
    Differences(1e-7, 1e-6, 1e-6, 0.0), replicas_agree=True, numerics_ok=True, compared_in="float32",
    collectives_of_ranks=[[SENT]], ranks_checked=[0], memory_tracked={"parameters": 40, "peak": 96},
    time_measured_s=0.25,
)  # fmt: skip


def executable():
    return jobs.strategy_of(load_model(jobs.spec("mlp")), (1, 2), 1)


def test_an_entry_has_its_keys_in_order():
    entry = entry_of(executable(), PREDICTED, RIGHT)
    assert list(entry) == KEYS
    assert json.loads(json.dumps(entry)) == entry
    assert (entry["memory_predicted_bytes"], entry["memory_tracked_bytes"]) == (100, 96)
    assert entry["collectives_issued"] == entry["collectives_predicted"]
    assert (entry["ok"], entry["collectives_in_order"], entry["order_unlike"]) == (True, True, [])


def test_ranks_that_differ_decide():
    entry = entry_of(executable(), PREDICTED, replace(RIGHT, ranks_unlike=["ranks 0 and 1 have to"]))
    assert (entry["ok"], entry["collectives_unlike"], entry["collectives_in_order"]) == (False, [], False)
    assert entry["order_unlike"] == ["ranks 0 and 1 have to"]
    entry = entry_of(executable(), PREDICTED, RunFindings.failed("a rank died"))
    assert (entry["ok"], entry["collectives_in_order"]) == (False, None)


def test_each_rank_is_compared_with_its_prediction():
    """Shards of other ranks than the first may be smaller, but not bigger or more."""
    smaller, bigger = SENT | {"bytes": 4}, SENT | {"bytes": 12}
    for second, wrong in (
        (SENT, ""),
        (smaller, ""),
        (bigger, "issued 1 of 12"),
        (SENT | {"count": 2}, "issued 2"),
    ):
        found = replace(RIGHT, collectives_of_ranks=[[SENT], [second]], ranks_checked=[0, 1])
        entry = entry_of(executable(), PREDICTED, found)
        assert entry["ok"] is not bool(wrong)
        assert all(line.startswith("rank 1: ") and wrong in line for line in entry["collectives_unlike"])
    found = replace(RIGHT, collectives_of_ranks=[[smaller], [smaller]], ranks_checked=[0, 1])
    assert all("rank 0: " in line for line in entry_of(executable(), PREDICTED, found)["collectives_unlike"])


@pytest.mark.parametrize(
    "change", [{"numerics_ok": False}, {"collectives_of_ranks": [[SENT, SENT | {"bytes": 4}]]}], ids=str
)
def test_what_is_wrong_decides(change):
    assert not entry_of(executable(), PREDICTED, replace(RIGHT, **change))["ok"]


@pytest.mark.parametrize(("expected", "tracked", "wrong"), [
    ((1e6,), [1_034_096, 900_000], []),
    ((1e6,), [900_000, 1_034_097], ["rank 1 "]),
    ((1e6,), [1_100_000, 1_100_000], ["rank 0 "]),
    ((1e6, 2e6), [1_000_000, 1_000_000], []),
    ((1e6, 2e5), [1_000_000, 1_000_000], ["rank 1 "]),
    ((0.0,), [4096, 0], []),
])  # fmt: skip
def test_memory_above_its_prediction_decides(expected, tracked, wrong):
    """By 3 % and 4 KiB; each part of the devices has a prediction of its own."""
    places = expected if len(expected) > 1 else ()
    predicted = replace(PREDICTED, memory_bytes=max(expected), of_places=places)
    found = replace(
        RIGHT, collectives_of_ranks=[[SENT]] * 2, ranks_checked=[0, 1], memory_tracked_of_ranks=tracked
    )
    entry = entry_of(executable(), predicted, found)
    assert entry["ok"] is not bool(wrong)
    assert [line[:7] for line in entry["memory_unlike"]] == wrong
    # Other kernels than those of the prediction, or no figure.
    unjudged = entry_of(executable(), predicted, found, compares_memory=False)
    assert (unjudged["ok"], unjudged["memory_unlike"]) == (True, None)
    assert (
        entry_of(executable(), predicted, replace(found, memory_tracked_of_ranks=[]))["memory_unlike"] is None
    )


def test_what_was_not_looked_at_decides_nothing():
    """Fake ranks compute no numbers and take no time."""
    entry = entry_of(executable(), PREDICTED, RunFindings(collectives_of_ranks=[[SENT]], ranks_checked=[0]))
    assert entry["ok"]
    assert [entry[key] for key in ("loss_difference", "replicas_agree", "time_measured_s", "error")] == [
        None
    ] * 4


def test_a_graph_unlike_its_module_fails_all():
    place = Place("cpu", "run here")
    for module, ok in ((None, True), (ModuleFindings(Differences(1e-7, 1e-6), {}), True),
                       (ModuleFindings(Differences(1e-7, 0.1), {}), False)):  # fmt: skip
        answer = answer_of([executable()], [PREDICTED], [RIGHT], place, module)
        assert list(answer) == ["ok", "checked_on", "plans", "module", "file"]
        assert answer["ok"] is ok
        assert answer["plans"][0]["ok"]


def test_a_graph_unlike_its_module_is_said_in_words():
    place, module = Place("cpu", "run here"), ModuleFindings(Differences(1e-7, 0.5), {}, "body.weight")
    data = answer_of([executable()], [PREDICTED], [RIGHT], place, module)
    assert data["module"]["worst_gradient"] == "body.weight"
    last = verify_text(data).splitlines()[-1]
    assert last.startswith("not ok: the captured graph, which every plan computes, is not the model itself")
    assert "the gradient of body.weight differs" in last
    assert last.endswith("1 of 1 plans agree with the graph")


def test_a_buffer_unlike_the_modules_is_named():
    module = ModuleFindings(Differences(1e-7, 1e-6, buffer=0.5), {}, "body.weight", worst_buffer="norm.steps")
    data = answer_of([executable()], [PREDICTED], [RIGHT], Place("cpu", "run here"), module)
    assert not data["ok"]
    text = verify_text(data)
    assert "buffers after two calls by 5.0e-01" in text
    assert "the buffer norm.steps has another value after two calls" in text.splitlines()[-1]


def test_rounding_of_narrow_parts_is_no_difference():
    """A difference of a model that computes in bfloat16 inside, beside what bfloat16 changes in its graph."""
    apart = Differences(1e-3, 2e-2)
    assert not ModuleFindings(apart, {}).ok
    assert ModuleFindings(apart, {}, "w", Differences(1e-3, 1e-2), "bfloat16").ok
    assert not ModuleFindings(Differences(1e-3, 1.0), {}, "w", Differences(1e-3, 1e-2), "bfloat16").ok


BOTH, FOUR = (0, 1), (0, 1, 2, 3)
GATHER, REDUCE = JointCall("all_gather", BOTH, 64), JointCall("all_reduce", FOUR, 8)
THERE, BACK = JointCall("send", (0, 1), 16), JointCall("send", (1, 0), 16)
AROUND = JointCall(RING_SEND, (0, 1), 16)


def test_ranks_agree_on_what_they_share():
    own = JointCall("all_gather", (2, 3), 32)
    assert disagreements({0: [GATHER, REDUCE], 1: [GATHER, REDUCE], 2: [REDUCE, own], 3: [REDUCE, own]}) == []
    # Only some ranks are known.
    assert disagreements({0: [GATHER, REDUCE], 3: [REDUCE]}) == []
    # Messages of one direction keep their order, whatever lies between them.
    assert disagreements({0: [THERE, BACK, REDUCE], 1: [REDUCE, BACK, THERE]}) == []


@pytest.mark.parametrize(("first", "second", "says"), [
    ([GATHER, REDUCE], [REDUCE, GATHER], "number 0 is all_gather of 64 bytes among ranks [0, 1] on rank "
     "0, and all_reduce of 8 bytes among ranks [0, 1, 2, 3] on rank 1"),
    ([REDUCE, GATHER], [REDUCE], "number 1 is all_gather of 64 bytes among ranks [0, 1] on rank 0, and "
     "nothing on rank 1"),
    ([], [REDUCE], "number 0 is nothing on rank 0, and all_reduce"),
    ([REDUCE], [REDUCE._replace(bytes=4)], "all_reduce of 4 bytes"),
    ([REDUCE], [REDUCE._replace(kind="broadcast")], "broadcast of 8 bytes"),
    ([THERE], [], "send of 16 bytes from rank 0 to 1 on rank 0, and nothing"),
    ([AROUND, AROUND], [AROUND], "number 1 is ring_send of 16 bytes from rank 0 to 1"),
])  # fmt: skip
def test_the_first_difference_is_named(first, second, says):
    (line,) = disagreements({0: first, 1: second})
    assert line.startswith("ranks 0 and 1 must issue their common collectives and messages in the same order")
    assert says in line


def test_a_group_is_named_once():
    """Of four ranks that share a sum, one that lacks it differs from each of the others."""
    lines = disagreements({0: [REDUCE], 1: [REDUCE], 2: [REDUCE], 3: []})
    assert [line.partition(" must")[0] for line in lines] == ["ranks 0 and 3"]


def test_sizes_that_values_decide_are_left_out():
    assert JointCall.of(BY_VALUES, [0, 1], 12) == JointCall(BY_VALUES, (0, 1), 0)
