"""How a rank starts: from which weights, on which device, with how many bytes."""

import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from tensoropt import MissingExtraError, PlanError, parallelize
from tensoropt.engine.engine import unsplit_strategy
from tensoropt.execute.initialise import Initialisation
from tensoropt.execute.parallel import rank_device, start_group
from tensoropt.execute.weights import WeightSource, _open_weights
from tensoropt.ranks.local_hardware import why_no_gpu
from tests.execute import start_jobs as jobs


@pytest.fixture(scope="module")
def stored(ranks, tmp_path_factory):
    """The same weights as a checkpoint of two ranks, and as safetensors in two files."""
    folder = tmp_path_factory.mktemp("weights")
    ranks.run(jobs.save, str(folder / "dcp"))
    state = {n: v.clone() for n, v in jobs.drawn(3).state_dict().items() if n != "head.weight"}
    names = sorted(state)
    (folder / "files").mkdir()
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({n: state[n] for n in part}, folder / "files" / f"part-{index}.safetensors")
    return {"dcp": str(folder / "dcp"), "files": str(folder / "files")}


WHOLE = ("sharded", "placed")
"""Plans of whose ranks each has all names, if not all values."""


@pytest.mark.sweep(quick=4)
@pytest.mark.parametrize(("source", "mode", "plan"), [
    ("drawn", "train", "sharded"), ("drawn", "train", "placed"),
    ("drawn", "train", "interleaved_1f1b"), ("dcp", "train", "1f1b"),
    ("drawn", "train", "1f1b"), ("dcp", "train", "interleaved_1f1b"),
    *((source, "inference", plan) for plan in WHOLE for source in ("dcp", "files", "drawn")),
])  # fmt: skip
def test_a_rank_starts_with_its_part_and_one_layer(ranks, stored, source, mode, plan):
    """In inference there are no gradients, so that its part of the parameters is all that is kept. A weight
    that two layers draw is kept between them, also while what no operator reads is drawn."""
    every = ranks.run(jobs.start, source, stored.get(source, ""), plan, mode, 1)
    names = [found["names"] for found in every]
    if plan in WHOLE:
        assert all(own == found["all"] for own, found in zip(names, every, strict=True))
    else:
        assert {*names[0], *names[1]} == {*every[0]["all"]} != {*names[0]}
    for found in every:
        assert not found["differ"]
        assert found["loss"] < 1e-5
        kept = found["kept"] / (2 if mode == "train" else 1)
        assert kept < (0.8 if plan in WHOLE else 0.9) * found["whole"]
        both = 2 * jobs.TIED if source == "drawn" else 0
        assert found["peak"] <= found["kept"] + jobs.LAYER + both + jobs.SMALL


@pytest.mark.slow
@pytest.mark.parametrize("source", ["drawn", "stored"])
def test_a_process_grows_by_its_stages_and_not_by_the_whole_model(four_ranks, tmp_path, source):
    """As the system counts it: parameters and gradients of its stage, layers that are read, leftovers."""
    path = str(tmp_path / "dcp") if source == "stored" else ""
    four_ranks.run(jobs.resident, 64, 32, 4, "", 2)  # what a first step loads of libraries is no parameter
    for found in four_ranks.run(jobs.resident, 1024, 32, 4, path, 2):
        own, layer = found["parameters"], found["layer"]
        assert own == found["whole"] / 4
        # What the whole model's parameters alone take is out of reach.
        assert found["started"] < 2 * own + 8 * layer + 2**24 < found["whole"]
        assert found["trained"] < 2 * own + 12 * layer + 2**24


def test_what_is_drawn_is_what_apply_draws():
    """Also where a call reads what another left, replaces a tensor, or overwrites what another drew."""

    def function(module: nn.Module) -> None:
        jobs.draw(module)
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)
        if isinstance(module, nn.LayerNorm):
            module.weight = nn.Parameter(torch.rand(jobs.WIDTH))
            module.bias.data = torch.randn(jobs.WIDTH)
        if isinstance(module, jobs.Tied):
            module.blocks[0].up.bias.mul_(2)

    plain, model = jobs.Tied(), jobs.on_meta()
    with torch.no_grad():
        torch.manual_seed(7)
        plain.apply(function)
    found = Initialisation(model, function, 7)
    wanted = dict(plain.named_parameters()) | dict(plain.named_buffers())
    assert all(name in found for name in wanted)
    order = found.order(list(wanted))
    assert order.index("embedding.weight") > order.index("blocks.5.up.weight")  # the head draws it anew
    for _ in range(2):
        drawn = dict(found.stream(list(wanted)))
        assert list(drawn) == order
        assert all(torch.equal(drawn[name], value) for name, value in wanted.items())
    (one,) = found.stream(["blocks.3.up.weight"])
    assert torch.equal(one[1], wanted["blocks.3.up.weight"])
    assert all(value.is_meta for value in [*model.parameters(), *model.buffers()])


def test_values_come_in_any_order():
    source = WeightSource(jobs.on_meta(), init_weights=jobs.draw, seed=7)
    plain = dict(jobs.drawn(7).named_parameters())
    values = source.values(plain)
    for name in reversed(list(values)):
        assert torch.equal(values[name], plain[name]), name


def refusal(**settings: Any) -> str:
    with pytest.raises(PlanError) as caught:
        parallelize(jobs.on_meta(), unsplit_strategy(jobs.graph()), jobs.batch(), **settings)
    return str(caught.value)


def looks(module: nn.Module) -> None:
    """What no function that draws weights may do: look at values."""
    for value in module.parameters(recurse=False):
        assert value.sum().item() != 1


NO_GPU = f"this rank cannot run on a GPU: {why_no_gpu()}, or pass device='cpu'"


@pytest.mark.parametrize(("settings", "says"), [
    ({"device": "cpu"}, "is on the meta device and has no value; pass checkpoint= or init_weights="),
    ({"device": "cpu", "checkpoint": "/nowhere"}, "does not exist; give a folder"),
    ({"device": "cpu", "init_weights": looks},
     "init_weights failed for embedding (Embedding) on the meta device, where it may not"),
    ({}, "names no type of device; pass device="),
    ({"device": "meta"}, "plans run on cpu or cuda, not on meta"),
    ({"device": "gpu"}, "is unknown to PyTorch"),
    *([({"device": "cuda"}, NO_GPU)] if why_no_gpu() else []),
])  # fmt: skip
def test_a_start_that_cannot_be_is_refused(settings, says):
    asked = settings if settings.get("device") == "cpu" else {"init_weights": jobs.draw} | settings
    assert says in refusal(**asked)


def test_weights_that_lack_values_are_refused(stored, tmp_path):
    assert "scale is on the meta device" in refusal(device="cpu", checkpoint=stored["dcp"])
    wrong = {n: v.clone() for n, v in jobs.drawn(1).state_dict().items() if "head" not in n}
    del wrong["unused.bias"]
    save_file(wrong, tmp_path / "less.safetensors")
    less = refusal(device="cpu", checkpoint=tmp_path / "less.safetensors")
    assert "less.safetensors lacks the model's unused.bias" in less
    wrong |= {"unused.bias": torch.zeros(5), "blocks.0.up.bias": torch.zeros(7)}
    save_file(wrong, tmp_path / "other.safetensors")
    other = refusal(device="cpu", checkpoint=tmp_path / "other.safetensors", init_weights=jobs.draw)
    assert "blocks.0.up.bias has the shape (7,) in checkpoint" in other
    twice = refusal(device="cpu", checkpoint=tmp_path)
    assert "is in less.safetensors and in other.safetensors" in twice


@pytest.mark.parametrize(("local", "seen", "index"), [("1", 2, 1), (None, 2, 0), ("2", 2, None)])
def test_a_rank_takes_the_gpu_of_its_number(monkeypatch, local, seen, index):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    if index is None:
        with pytest.raises(PlanError, match="no GPU 2: PyTorch sees 2 here; start at most 2 ranks per host"):
            rank_device("cuda")
        return
    assert rank_device("cuda") == torch.device("cuda", index)
    assert current == [torch.device("cuda", index)]
    assert rank_device("cuda:1") == torch.device("cuda", 1)


def test_gpus_talk_through_nccl_bound_to_their_device(monkeypatch):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda kind, **more: asked.append((kind, more)))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    start_group(torch.device("cuda", 1), 5.0)
    start_group(torch.device("cpu"))
    assert asked[0] == ("nccl", {"timeout": timedelta(seconds=5), "device_id": torch.device("cuda", 1)})
    assert asked[1] == ("gloo", {"timeout": None})
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(PlanError, match="GPUs communicate by NCCL"):
        start_group(torch.device("cuda", 1))


def test_safetensors_that_are_not_installed(tmp_path, monkeypatch):
    (tmp_path / "some.safetensors").touch()
    with pytest.raises(PlanError, match="is not a safetensors file"):
        _open_weights(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tensoropt\[safetensors\]'"):
        _open_weights(tmp_path)
