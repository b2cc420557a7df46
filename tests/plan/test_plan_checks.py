"""Plans that were edited by hand, or damaged: a sentence each, and never anything else."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensoropt import PlanError, TensorOptError, load_cluster, load_plan
from tensoropt.execute.executable import resolve_plan
from tensoropt.planners.registry import planner
from tests.planners.problems import small

QUESTION = ("gpt2", ((2,),), (2,))
KINDS = {"sharded": "data_parallel", "placed": "m_etf", "pipelined": "gpipe"}


@pytest.fixture(scope="module", params=KINDS)
def plan(request):
    return planner(KINDS[request.param])(small(*QUESTION), None, 0)[0]


@pytest.fixture(scope="module")
def sharded():
    return planner("data_parallel")(small(*QUESTION), None, 0)[0]


def saved(tmp_path: Path, data: Any) -> Path:
    file = tmp_path / "plan.json"
    text = data if isinstance(data, (str, bytes)) else json.dumps(data)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def resolved(file: Path) -> None:
    """What running a plan does with its file before anything runs."""
    found = resolve_plan(load_plan(file))
    found.bind(small(*QUESTION).prepared.graph)
    assert found.cluster is None or found.cluster.device_count
    if found.plan is not None and found.plan.model.call is not None:
        found.example_call()


def test_a_plan_that_nobody_touched_is_taken(plan, tmp_path):
    resolved(saved(tmp_path, plan.to_data()))
    file = tmp_path / "bom.json"
    file.write_bytes(b"\xef\xbb\xbf" + plan.to_json().encode())
    assert load_plan(file) == plan


def first(data: dict[str, Any], of: str = "operators") -> dict[str, Any]:
    found: dict[str, Any] = next(iter(data[of].values()))
    return found


@pytest.mark.parametrize(("edit", "message"), [
    (lambda d: first(d).update(axes={}), r"operator \S+ has no entry for the mesh axis '\w+'; write the dim"),
    (lambda d: first(d).update(axes={"other": "none"}),
     r"operator \S+ has the axis 'other', which the mesh does not have; it has \w+"),
    (lambda d: d["mesh"].update(names=["other"]), r"which the mesh does not have; it has other"),
    (lambda d: d["mesh"].update(shape=[3]),
     r"the plan's mesh 3 has 3 devices, but its cluster local:2 has 2; explore on the intended"),
    (lambda d: d["mesh"].update(shape=[]), r"the mesh \[\] needs 0 distinct axis names"),
    (lambda d: d["mesh"].update(placed=True),
     r"the mesh has 'placed' True .* is a sharded plan, .* has 'placed' False; make both"),
    (lambda d: d["operators"].update(nonsense=first(d)),
     r"the plan names nonsense .*, which this model does not have"),
    (lambda d: d["operators"].pop(next(iter(d["operators"]))), r"says nothing about \S+ \(groups\)"),
    (lambda d: d["parameters"].popitem(), r"the plan says nothing about \S+ \(stored\)"),
    (lambda d: first(d).update(device=0), r"operator \S+ has device 0 and order None in a sharded plan"),
    (lambda d: first(d, "parameters").update(device=0), r"parameter \S+ has device 0 in a sharded plan"),
    (lambda d: first(d, "parameters")["stored"].pop(), r"parameter \S+ is stored as .* one for each mesh"),
    (lambda d: d["cluster"].update(devices=5), r"the plan's cluster cannot be read"),
    (lambda d: d.pop("mesh"), "mesh"),
    (lambda d: d.update(micro_batches=0), "micro_batches"),
    (lambda d: d.update(optimizer="lion"), "optimizer"),
    (lambda d: first(d).pop("axes"), r"operators\.\S+\.axes"),
    (lambda d: first(d, "parameters").update(stored=3), r"parameters\.\S+\.stored"),
    (lambda d: d.update(colour="red"), "colour"),
    (lambda d: d.update(schema="tensoropt.plan/3"), "tensoropt.plan/3"),
])  # fmt: skip
def test_what_does_not_agree_is_named(sharded, tmp_path, edit, message):
    data = sharded.to_data()
    edit(data)
    with pytest.raises(PlanError, match=message):
        resolved(saved(tmp_path, data))


@pytest.mark.parametrize("cluster", [{}, load_cluster("cpu:2").to_dict()])
def test_no_cluster_and_one_of_as_many_devices_are_taken(sharded, tmp_path, cluster):
    resolved(saved(tmp_path, {**sharded.to_data(), "cluster": cluster}))


@pytest.mark.parametrize(("text", "message"), [
    ('{"schema": "tensoropt.plan/4", "planner": ', "the file may be incomplete"),
    ("[" * 100_000, "is not a plan"),
    ('{"schema": ' + "1" * 5000 + "}", "is not a plan"),
    ("", "the file may be incomplete"),
    ("[1]", "is not a plan"),
    (b"\xff\xfe", "is not a plan"),
])  # fmt: skip
def test_files_that_are_damaged(tmp_path, text, message):
    with pytest.raises(PlanError, match=message):
        load_plan(saved(tmp_path, text))


# -- whatever is changed ----------------------------------------------------------------------------

OTHERS = (
    None, True, -1, 0, 3, 10**30, 0.5, 1e308, float("inf"), "", "none", "x", [], {}, [1], [[]], {"a": 1},
)  # fmt: skip


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested data, as the keys that lead there."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(data[key], (*path, key))


def mutated(data: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The data with one place deleted, renamed, given another value or another's."""
    data = copy.deepcopy(data)
    every = list(places(data))
    # By depth first: most places are deep inside of operators.
    depth = draw.choice(sorted({len(path) for path in every}))
    *way, last = draw.choice([path for path in every if len(path) == depth])
    holder = data
    for key in way:
        holder = holder[key]
    kind = draw.choice(("delete", "rename", "retype", "swap"))
    if kind == "rename" and isinstance(holder, dict):
        holder[draw.choice(("x", "", last + "_", last[:-1]))] = holder.pop(last)
    elif kind == "delete":
        del holder[last]
    elif kind == "swap":
        other = draw.choice(every)
        value = data
        for key in other:
            value = value[key]
        holder[last] = copy.deepcopy(value)
    else:
        holder[last] = draw.choice(OTHERS)
    return data


def test_whatever_is_changed_ends_in_a_plan_or_a_sentence(plan, tmp_path):
    draw, data = random.Random(0), plan.to_data()
    refused = 0
    for number in range(250):
        file = saved(tmp_path, mutated(data, draw))
        try:
            resolved(file)
        except TensorOptError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"change {number}, {type(error).__name__}: {error}") from error
    assert refused > 50
