"""Forms become command lines that the command line understands, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples_app import FORM
from tensoropt_app.jobs.fields import PIN, faults
from tensoropt_app.jobs.request import (
    Hardware,
    RequestError,
    hardware_from,
    request_from,
)

from tensoropt.cli.parser import parser
from tensoropt.cluster import load_cluster
from tensoropt.errors import TensorOptError
from tensoropt.question.constraints import constraints_of, load_constraints
from tensoropt.question.question import Question
from tensoropt.question.settings import Settings, settings_fields


def words(tmp_path: Path, **changes: Any) -> list[str]:
    return request_from({**FORM, **changes}, {}).arguments(tmp_path)


def test_a_preset_stays_its_name(tmp_path: Path) -> None:
    found = words(tmp_path)
    assert found[:4] == ["explore", "zoo:gpt2-tiny", "--cluster", "dgx-h100"]
    assert words(tmp_path, nodes=4, between="IB-400G")[3] == "dgx-h100x4"
    assert words(tmp_path, cluster="local", per_node=3)[3] == "cpu:3"


def test_an_edited_cluster_becomes_a_file_that_loads(tmp_path: Path) -> None:
    file = words(
        tmp_path, kind="A100-80GB", per_node=4, nodes=2, inside="NVLink3", between="IB-200G", price=2.5
    )[3]
    cluster = load_cluster(file)
    assert (cluster.device_count, cluster.device.name, cluster.price_per_hour) == (8, "A100-80GB", 20.0)
    assert [level.size for level in cluster.levels] == [2, 4]


def test_options_stand_behind_the_models_name(tmp_path: Path) -> None:
    asked = request_from({**FORM, "options": " layers=4&hidden=32 "}, {})
    assert asked.arguments(tmp_path)[:2] == ["explore", "zoo:gpt2-tiny?layers=4&hidden=32"]
    assert asked.title.startswith("gpt2-tiny?layers=4&hidden=32 on dgx-h100")


def test_options_are_those_of_the_command_line(tmp_path: Path) -> None:
    found = words(
        tmp_path, mode="inference", optimizer="sgd", micro_batches="1, 2", epsilon=0, max_points=50, batch=8
    )
    options = parser().parse_args(found)
    assert (options.mode, options.optimizer, options.micro_batches) == ("inference", "sgd", "1,2")
    assert (options.epsilon, options.max_points, options.batch) == (0.0, 50, "8")


def test_an_empty_form_asks_the_defaults_and_what_is_typed_is_never_a_file(tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text(PIN)
    assert request_from({**FORM, "epsilon": " "}, {}).question.settings == Settings()
    with pytest.raises(RequestError, match="sections with entries"):
        words(tmp_path, constraints=str(tmp_path / "pins.json"))


def test_every_value_that_the_form_offers_is_one_of_the_command_lines(tmp_path: Path) -> None:
    for setting in settings_fields():
        for value in setting.offered:
            options = parser().parse_args(words(tmp_path, **{setting.key: value}))
            assert getattr(options, setting.key) == setting.from_form(value)


def test_planners_make_it_a_comparison(tmp_path: Path) -> None:
    found = words(tmp_path, planners=["zero", "megatron"])
    options = parser().parse_args(found)
    assert (options.verb, options.planners) == ("explore", "zero,megatron")


def test_numbers_of_devices_make_it_a_profile(tmp_path: Path) -> None:
    options = parser().parse_args(words(tmp_path, devices="2, 4"))
    assert (options.verb, options.devices) == ("explore", "2,4")


def test_a_file_may_be_trained_and_cut(tmp_path: Path) -> None:
    uploads = {"upload-1": (tmp_path / "x.onnx", "mine.onnx")}
    form = {**FORM, "model": "upload-1", "loss": "mse", "outputs": "/net/Relu_output_0"}
    options = parser().parse_args(request_from(form, uploads).arguments(tmp_path))
    assert (options.loss, options.output, options.batch) == ("mse", ["/net/Relu_output_0"], None)
    form["mode"] = "inference"
    assert parser().parse_args(request_from(form, uploads).arguments(tmp_path)).loss is None


def test_an_upload_is_named_by_its_token_only(tmp_path: Path) -> None:
    uploads = {"upload-1": (tmp_path / "x.onnx", "mine.onnx")}
    request = request_from({**FORM, "model": "upload-1", "dims": "batch=8, x[0]=4"}, uploads)
    assert request.question.model == str(tmp_path / "x.onnx")
    assert request.title == "mine.onnx on dgx-h100 · batch=8 · x[0]=4"
    assert request.question.dims == {"batch": 8, "x[0]": 4}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "train.py:build"}, "choose a model from the list"),
        ({"model": "/etc/passwd"}, "choose a model from the list"),
        ({"model": "os:getcwd"}, "choose a model from the list"),
        ({"model": None}, "choose a model from the list"),
        ({"cluster": "/etc/passwd"}, "choose a cluster from the list"),
        ({"kind": "GTX-9"}, "choose a device kind"),
        ({"inside": "string"}, "choose links from the list"),
        ({"per_node": 0}, "devices per node: between 1 and"),
        ({"per_node": 2.5}, "whole number"),
        ({"per_node": float("nan")}, "is not a number"),
        ({"nodes": 10**9}, "nodes: between 1 and"),
        ({"micro_batches": "1;rm -rf"}, "neither auto nor a list"),
        ({"micro_batches": "1,3", "batch": 8}, "3 micro-batches do not divide the batch of 8"),
        ({"epsilon": 300}, "between 0 and 100; 0.1 is the usual one"),
        ({"max_points": 1}, "at least 2"),
        ({"batch": -1}, "the batch: between 1 and"),
        ({"options": "layer=2"}, "model options: 'gpt2-tiny' has no option 'layer'; did you mean 'layers'"),
        ({"options": "layers=2;--out /etc"}, "model options: .*layers: '2;--out /etc' is not a whole number"),
        ({"dtype": "int3"}, "unknown dtype 'int3'; use auto, float32 or bfloat16"),
        ({"optimizer": ["adam"]}, "unknown optimizer"),
        ({"planners": ["best"]}, "no planner called best"),
        ({"planners": {"a": 1}}, "no planner called"),
        ({"devices": "all of them"}, "neither auto nor a list"),
        ({"devices": "auto", "planners": ["zero"]}, "leave either"),
        ({"batch": "auto", "devices": "1,2"}, "several batches are explored on one cluster"),
        ({"batch": "8,16", "also_on": ["dgx-a100"]}, "several batches are explored on one cluster"),
        ({"batch": "8,16", "planners": ["zero"]}, "without planners"),
        ({"batch": "8,0"}, "has a batch of 0"),
    ],
)
def test_what_cannot_be_started_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        words(tmp_path, **changes)


@pytest.mark.parametrize("dim", ["batch=0", "--out=/etc", "batch=8;x", "=8", "batch"])
def test_dims_hold_sizes_only(tmp_path: Path, dim: str) -> None:
    uploads = {"upload-1": (tmp_path / "x.onnx", "mine.onnx")}
    with pytest.raises(RequestError, match="is not a size"):
        request_from({**FORM, "model": "upload-1", "dims": dim}, uploads)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"loss": "--out"}, "the loss is one of"), ({"outputs": "--out=/etc"}, "is not the name of a tensor")],
)
def test_what_a_file_cannot_mean_is_said(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    uploads = {"upload-1": (tmp_path / "x.onnx", "mine.onnx")}
    with pytest.raises(RequestError, match=said):
        request_from({**FORM, "model": "upload-1", **changes}, uploads)


def test_a_cluster_that_lacks_a_link_is_refused_with_the_remedy() -> None:
    with pytest.raises(TensorOptError, match="links lacks inter_node"):
        hardware_from({**FORM, "nodes": 2}).described()


def test_every_preset_is_shown_as_it_is() -> None:
    from tensoropt.cluster import list_clusters

    for name in list_clusters():
        if not name.endswith("xN"):
            assert Hardware.of(name).asked() == name


def test_an_edited_cluster_is_data(tmp_path: Path) -> None:
    words(tmp_path, per_node=4)
    assert json.loads((tmp_path / "cluster.json").read_text())["devices"] == [
        {"kind": "H100-80GB", "count": 4}
    ]


@pytest.mark.parametrize(
    ("field", "typed", "rule"),
    [
        ("batch", "-5", "between 1 and"), ("batch", "2.5", "whole number"), ("batch", "many", "not a number"),
        ("batch", "8,x", "nor a list such as 8,16,32"), ("batch", "0,8", "has a batch of 0"),
        ("per_node", "0", "between 1 and 1,024"), ("nodes", "", "whole number"), ("price", "1e9", "at most"),
        ("price", "-1", "more than 0"), ("epsilon", "100", "between 0 and 100"),
        ("epsilon", "120%", "between 0 and 100"),
        ("max_points", "1", "at least 2"), ("micro_batches", "two", "neither auto"),
        ("devices", "-1", "neither auto"), ("dims", "batch", "for example"), ("memory", "lots", "24GiB"),
        ("memory", "--anew", "24GiB"), ("seed", "-1", "from 0 to"), ("seed", "0.5", "from 0 to"),
        ("constraints", "pin: []", "there are no constraints"),
        ("constraints", "[1]", "sections with entries"),
        ("constraints", "pin:\n- a: [", "neither YAML nor JSON (line "),
        ("constraints", '{"pin": [{"operators": "a"}]}', "'axes'"),
    ],
)  # fmt: skip
def test_the_rule_is_said_and_nothing_is_corrected(field: str, typed: str, rule: str) -> None:
    assert not any(faults(FORM).values())
    found = faults({**FORM, field: typed})
    assert rule in found.pop(field)
    assert not any(found.values())


@pytest.mark.parametrize("typed", ["auto", "8,16,32", " 8, 16 "])
def test_several_batches_are_those_of_the_command_line(tmp_path: Path, typed: str) -> None:
    found = words(tmp_path, batch=typed, micro_batches="8")
    assert parser().parse_args(found).batch == typed.replace(" ", "")
    assert not any(faults({**FORM, "batch": typed}).values())


def test_numbers_may_be_text(tmp_path: Path) -> None:
    found = words(tmp_path, batch="1e3", per_node="4", nodes="1", price="2.5", epsilon="0.5", max_points="50")
    options = parser().parse_args(found)
    assert (options.batch, options.epsilon, options.max_points) == ("1000", 0.005, 50)
    assert load_cluster(found[3]).price_per_hour == 10.0


def test_a_title_says_what_is_not_as_usual() -> None:
    def title(**changes: Any) -> str:
        return request_from({**FORM, **changes}, {}).title

    assert title() == "gpt2-tiny on dgx-h100"
    assert title(batch="8", dtype="bfloat16") == "gpt2-tiny on dgx-h100 · batch 8 · bfloat16"
    assert title(batch="8,16") == "gpt2-tiny on dgx-h100 · batch 8,16"
    assert title(nodes="4", between="IB-400G") == "gpt2-tiny on dgx-h100, 4 nodes, IB-400G between nodes"
    assert title(kind="A100-80GB", per_node="4").startswith("gpt2-tiny on dgx-h100, 4 × A100-80GB")
    assert title(planners=["zero"], micro_batches="1,2").endswith("1,2 micro-batches · beside zero")
    assert title(devices="1,2").endswith("· on 1,2 devices")


def test_a_budget_and_a_seed_are_passed_on(tmp_path: Path) -> None:
    options = parser().parse_args(words(tmp_path, memory="24 GiB", seed="7"))
    assert (options.memory, options.seed) == (
        parser().parse_args([*words(tmp_path), "--memory", "24GiB"]).memory,
        7,
    )


def test_constraints_become_a_file_that_loads(tmp_path: Path) -> None:
    found = words(tmp_path, constraints=PIN)
    file = Path(parser().parse_args(found).constraints)
    assert load_constraints(file) == constraints_of(yaml.safe_load(PIN))
    question = request_from({**FORM, "constraints": PIN}, {}).question
    assert Question.of(json.loads(json.dumps(question.data()))) == question
    assert request_from({**FORM, "constraints": PIN}, {}).title.endswith("· with constraints")
    assert "--constraints" not in words(tmp_path, constraints=" ")
    assert "neither YAML nor JSON" in faults({**FORM, "constraints": "[" * 40_000})["constraints"]
    assert "at most" in faults({**FORM, "constraints": "[" * 60_000})["constraints"]
