"""bitsandbytes' own layers, as transformers and peft use them, under plans."""

import pytest
import torch
from torch import nn

import tensoropt
from tensoropt.capture import capture
from tensoropt.capture.bitsandbytes import replace_layers
from tensoropt.errors import CaptureError
from tensoropt.ops.families.quantised import QUANTISED_LINEAR
from tensoropt.ops.quantised import QuantisedLinear

pytest.importorskip("bitsandbytes")
import bitsandbytes

from tests.integrations import bitsandbytes_jobs as jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    jobs.save_model(made)
    return str(made)


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_layers_of_ours_compute_what_theirs_do(folder, kind):
    """And so do their gradients; bytes are the very same memory."""
    theirs, ours = (jobs.build(folder, kind) for _ in range(2))
    memory = {
        p.untyped_storage().data_ptr() for p in ours.parameters() if p.dtype in (torch.uint8, torch.int8)
    }
    (note,) = replace_layers(ours)
    assert note.startswith(f"7 layers of bitsandbytes became layers with the same weight bytes ({kind})")
    assert replace_layers(ours) == ()
    layers = [module for module in ours.modules() if isinstance(module, QuantisedLinear)]
    assert {layer.scheme for layer in layers} == {kind}
    assert {layer.codes.untyped_storage().data_ptr() for layer in layers} == memory
    found = []
    for model in (theirs, ours):
        loss = model(**jobs.batch()).loss
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found.append((loss, dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("again", [True, False], ids=["checkpoints", "plain"])
def test_a_model_that_peft_has_prepared_is_captured(folder, again):
    """In bfloat16, with its norms in float32 and hooks that let gradients through frozen layers."""
    model = jobs.prepared(folder, again)
    graph = capture(model, (), jobs.batch()).graph  # and is compared with the model's own step
    layers = [op for op in graph.operators if op.target == QUANTISED_LINEAR]
    assert len(layers) == 7
    assert {graph.tensors[op.args[0].name].dtype for op in layers} == {"bfloat16"}
    trained = {str(t.key) for t in graph.parameters if t.requires_grad}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["nf4-double", "int8"])
def test_two_ranks_train_as_one_process_does(folder, kind, ranks, tmp_path):
    found = tensoropt.explore(
        jobs.build(folder, kind), (), jobs.batch(), cluster="cpu:2", measure="never", micro_batches=[1],
        recompute="never", placements="never", pipelines="never",
    )  # fmt: skip
    assert found.model.adapters == f"LoRA r4 on {kind}"
    for row in {0, len(found.points) - 1}:
        plan = tmp_path / f"{row}.json"
        found.plan(row).save(plan)
        for far in ranks.run(jobs.step, folder, kind, str(plan), str(tmp_path / f"adapters-{row}")):
            assert all(value < 1e-5 for value in far.values()), (found.names[row], far)


def test_a_model_without_values_is_explored_too():
    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(128, 64, quant_type="nf4", compress_statistics=True)
        model = nn.Sequential(nn.Linear(128, 128), layer)
    x = torch.empty(4, 128, device="meta")
    graph = capture(model, (x,), loss=lambda y: y.square().mean()).graph
    assert sum(t.bytes for t in graph.parameters if t.dtype == "uint8") == 64 * (64 + 2)


def test_what_has_no_bytes_or_no_whole_blocks_is_refused():
    def of(layer: nn.Module, size: int) -> None:
        capture(nn.Sequential(layer), (torch.randn(4, size),), loss=lambda y: y.square().mean())

    layer = bitsandbytes.nn.Linear4bit(128, 64)
    with pytest.raises(CaptureError, match=r"`0` is not quantised yet; .*\.to\('cpu'\)"):
        of(layer, 128)
    with pytest.raises(CaptureError, match="every 64 weights, which do not divide the 96 inputs"):
        of(bitsandbytes.nn.Linear4bit(96, 64).to("cpu"), 96)
