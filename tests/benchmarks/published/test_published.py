"""What is read of published runs, what is refused, and that two depths say what deeper models take."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tensoropt.capture import capture
from tensoropt.cluster.catalog import device_kind
from tensoropt.profiling.store import ProfileStore
from tensoropt.sharding.recipes import FULL, NOTHING
from tests.benchmarks.published import predict as predicting
from tests.benchmarks.published.decoder import (
    Architecture,
    Variant,
    attention_of_scores,
    build,
    parameters_of,
)
from tests.benchmarks.published.predict import figures, other_notes, predict, without
from tests.benchmarks.published.report import medians, summary
from tests.benchmarks.published.runs import RefusedRunError, Run, cluster_of, pinned_of

ROW = {
    "id": "x-1", "source": "x", "outcome": "ok", "model": "small", "seq_len": "32", "global_batch_seqs": "16",
    "micro_batch_per_gpu": "2", "grad_accum": "2", "gpu": "A100-80GB", "n_gpus": "4", "gpus_per_node": "8",
    "internode_net": "single node", "dp": "4", "dp_kind": "zero3", "shard_group": "4", "tp": "1",
    "seq_parallel": "no", "pp": "1", "cp": "1", "recompute": "none", "precision": "bf16", "flash_attn": "yes",
    "step_s": "1.5",
}  # fmt: skip
GPT = Architecture(
    layers=6, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, gated=False, vocab=512, tied=True,
    pos="learned", bias=True, params=0,
)  # fmt: skip
LLAMA = replace(GPT, kv_heads=2, gated=True, tied=False, pos="rope", bias=False)


def run(**changed: str) -> Run:
    return Run({**ROW, **changed})


def small(of: Architecture, sequence: int) -> tuple[Architecture, dict]:
    """An architecture with its parameters counted, and the models of a file that has it."""
    of = replace(of, params=parameters_of(of, sequence))
    return of, {"small": {name: getattr(of, name) for name in of.__slots__}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pp": "4", "dp": "1", "pp_schedule": "zigzag"}, "schedule is zigzag, which is unknown"),
        ({"pp": "2", "dp": "4"}, "x pipeline 2 is not 4 GPUs"),
        ({"cp": "2"}, "context 2 x tensor 1 x pipeline 1 is not 4 GPUs"),
        ({"precision": "fp8"}, "computes in fp8"),
        ({"recompute": "selective (some blocks)"}, "recomputes parts"),
        ({"recompute": "selective (what is cheap)"}, "recomputes parts"),
        ({"outcome": "refused", "step_s": ""}, "says nothing of its step"),
        ({"tp": "2"}, "is not 4 GPUs"),
        ({"global_batch_seqs": "12"}, "equal micro-batches"),
        ({"dp_kind": "zero9"}, "unknown"),
    ],
)
def test_what_cannot_be_expressed_is_refused_in_words(changed, words):
    with pytest.raises(RefusedRunError, match=words):
        pinned_of(run(**changed))
    with ProfileStore(":memory:") as store:
        row = predict(run(**changed), {}, store)
    assert words in row["refused"]
    assert row["predicted_step_s"] is row["predicted_memory_bytes"] is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"outcome": "oom", "step_s": ""}, "no step time"), ({}, "not in the file of models")],
)
def test_what_cannot_be_predicted_is_refused_in_words(changed, words):
    with ProfileStore(":memory:") as store:
        assert words in predict(run(**changed), {}, store)["refused"]


@pytest.mark.parametrize(
    ("gpu", "words"), [("TPU-v4", "no data sheet"), ("A100", "may be any of A100-40GB, A100-80GB")]
)
def test_an_unknown_gpu_is_refused(gpu, words):
    with pytest.raises(RefusedRunError, match=words):
        cluster_of(run(gpu=gpu))


def test_a_gpu_named_without_its_memory_is_the_only_such_kind():
    (kind,) = cluster_of(run(gpu="H200", n_gpus="8", dp="8")).device_kinds
    assert kind.name == "H200-141GB"


def test_a_split_context_is_pinned():
    pinned = pinned_of(run(dp="2", cp="2", dp_kind="zero1", shard_group=""))
    assert (pinned.data, pinned.context) == (2, 2)
    # The state is sharded over the ranks of a context even where there are no others.
    assert pinned_of(run(dp="1", cp="4", dp_kind="zero1", shard_group="", grad_accum="8")).stage == 1


@pytest.mark.parametrize(
    ("words", "bytes_per_s"),
    [
        ("8x200 Gb/s HDR InfiniBand per node", 8 * 25e9),
        ("1600 Gb/s per node RoCE", 8 * 25e9),
        ("400 Gb/s per node (per-node reading assumed)", 4 * 12.5e9),
        ("unsaid", 8 * 25e9),
    ],
)
def test_the_network_of_a_node_is_as_stated(words, bytes_per_s):
    level = cluster_of(run(n_gpus="16", dp="16", internode_net=words)).levels[0]
    assert level.link.bandwidth_bytes_per_s * level.link_count == bytes_per_s


@pytest.mark.parametrize(("gpus", "of_a_domain"), [(4, 4), (72, 72), (128, 64), (512, 64), (216, 72)])
def test_an_nvlink_domain_is_a_node_of_which_equally_many_gpus_are_used(gpus, of_a_domain):
    words = "NVLink domain of 72 GPUs; 400 Gb/s per GPU between racks (assumed)"
    of = run(gpu="GB200", n_gpus=str(gpus), dp=str(gpus), gpus_per_node="4", internode_net=words)
    *racks, inside = cluster_of(of).levels
    assert (inside.size, inside.link.name) == (of_a_domain, "NVLink5")
    assert [rack.size for rack in racks] == ([gpus // of_a_domain] if gpus > 72 else [])
    for rack in racks:
        assert rack.link.bandwidth_bytes_per_s * rack.link_count == of_a_domain * 50e9


@pytest.mark.parametrize("of", [GPT, LLAMA], ids=["gpt", "llama"])
def test_a_decoder_has_the_parameters_of_its_numbers(of):
    norms = 2 * of.layers + 1
    kv = of.kv_heads * of.head_dim
    products = of.hidden * (2 * of.hidden + 2 * kv) + (3 if of.gated else 2) * of.hidden * of.ffn
    biases = (2 * of.hidden + 2 * kv + of.ffn + of.hidden) if of.bias else 0
    expected = of.layers * (products + biases) + norms * of.hidden * (2 if of.bias else 1)
    expected += of.vocab * of.hidden * (1 if of.tied else 2)
    assert parameters_of(of, 32) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "recompute"), [(GPT, "none"), (LLAMA, "full"), (GPT, "full"), (LLAMA, "none")]
)
def test_two_depths_say_what_a_deeper_model_takes(of, recompute):
    with ProfileStore(":memory:") as store:
        extended, _ = figures(run(recompute=recompute), of, store, whole=False)
        whole, _ = figures(run(recompute=recompute), of, store, whole=True)
    assert of.layers > predicting.DEPTHS[-1]
    for name in ("predicted_step_s", "compute_s", "communication_s", "exposed_s"):
        assert extended[name] == pytest.approx(whole[name], rel=1e-6)
    assert extended["predicted_memory_bytes"] == pytest.approx(whole["predicted_memory_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("said", "source", "recomputed"),
    [
        ("none", "", {None: 1.0}),
        ("full", "", {FULL: 1.0}),
        ("near full (qkv projections kept)", "", {"query, key, value products": 1.0}),
        ("partial (dots kept except MLP, policy by scale)", "", {"attention products": 1.0}),
        ("selective (attention core)", "", {"attention core": 1.0}),
        ("selective (op)", "torchtitan benchmarks", {"products/2": 1.0}),
        ("selective (every second product)", "", {"products/2": 1.0}),
        ("partial (dots kept)", "", {"products": 1.0}),
        ("selective (moe_act, layernorm)", "", {"norms and activations": 1.0}),
        ("every 4 layers", "", {None: 0.75, FULL: 0.25}),
        ("selective (every second block)", "", {None: 0.5, FULL: 0.5}),
    ],
)
def test_what_a_run_recomputes_has_a_name(said, source, recomputed):
    one = run(recompute=said, source=source)
    assert one.recomputed == recomputed
    for recipe in recomputed:
        assert pinned_of(one, recipe=recipe).recompute == (recipe or NOTHING)


@pytest.mark.slow
def test_a_run_that_recomputes_a_part_lies_between_all_and_nothing():
    some_blocks = {"recompute": "selective (some blocks)", "notes": "blocks recomputed is about 25%"}
    how = ({"recompute": "full"}, {"recompute": "partial (dots kept)"}, {"recompute": "none"}, some_blocks)
    with ProfileStore(":memory:") as store:
        of = replace(LLAMA, layers=2)
        full, part, none, some = (figures(run(**one), of, store, whole=True)[0] for one in how)
    assert full["compute_s"] > part["compute_s"] > none["compute_s"]
    assert full["predicted_memory_bytes"] < part["predicted_memory_bytes"] < none["predicted_memory_bytes"]
    assert some == pytest.approx({name: 0.75 * none[name] + 0.25 * full[name] for name in some})


def test_errors_are_medians_and_held_out_sources_stand_apart():
    def row(source, ratio, *, single=True, refused=None):
        return {
            "source": source, "single_node": single, "refused": refused,
            "predicted_step_s": 2.0 * ratio, "published_step_s": 2.0,
        }  # fmt: skip

    rows = [row("llm-foundry", 1.1), row("llm-foundry", 0.8), row("llm-foundry", 1.3), row("other", 1.5)]
    rows += [row("other", 3.0, single=False), row("other", 1.0, refused="why")]
    found = medians(rows)
    assert found["single_node_fitted"]["median_error"] == pytest.approx(0.2)
    held_out = {"runs": 1, "median_error": 0.5, "worst_error": 0.5, "median_ratio": 1.5}
    assert found["single_node_held_out"] == pytest.approx(held_out)
    assert found["by_source"]["other"]["refused"] == 1
    assert summary([])["median_error"] is None


PIPED = {"pp": "2", "dp": "2", "grad_accum": "4", "pp_schedule": "1f1b", "dp_kind": "zero1"}


@pytest.mark.parametrize(
    ("said", "stages", "pinned"),
    [
        ("1f1b", "", ("1f1b", 1)),
        ("interleaved 1f1b", "3", ("interleaved_1f1b", 3)),
        ("interleaved 1f1b (tunable)", "unsaid", ("interleaved_1f1b", 8)),
    ],
)
def test_a_pipelined_run_is_pinned_with_its_schedule(said, stages, pinned):
    found = pinned_of(run(**PIPED | {"pp_schedule": said, "virtual_stages": stages}))
    assert (found.places, found.schedule, found.stages_per_place) == (2, *pinned)


def test_sequence_parallelism_is_pinned_where_a_run_is_taken_to_have_it():
    split = PIPED | {"tp": "2", "n_gpus": "8", "gpus_per_node": "8"}
    for said, pinned in (("no", False), ("yes", True), ("yes (assumed)", True)):
        one = run(**split | {"seq_parallel": said})
        assert pinned_of(one).sequence_parallel is pinned
        assert any("along the sequence" in note for note in other_notes(one)) is ("assumed" in said)


@pytest.mark.slow
def test_pipelined_runs_are_predicted_and_say_what_is_assumed():
    _, models = small(GPT, 32)
    with ProfileStore(":memory:") as store:
        row = predict(run(**PIPED | {"precision": "fp16", "flash_attn": "no"}), models, store)
    assert row["refused"] is None
    assert row["predicted_step_s"] > 0
    assert any("other 16 bits" in note for note in row["notes"])


@pytest.mark.slow
def test_a_term_that_is_left_out_changes_what_is_predicted():
    def seconds(*terms):
        with ProfileStore(":memory:") as store, ExitStack() as stack:
            for term in terms:
                stack.enter_context(without(term))
            return figures(run(), replace(GPT, layers=1), store, whole=True)[0]["predicted_step_s"]

    whole, no_host = seconds(), seconds("host")
    assert whole < no_host
    # A step of so small a model waits for its host, whatever computing takes; without the host it shows.
    assert seconds("host", "slow-down") < no_host
    assert seconds() == whole


def test_jobs_whose_kernels_cast_and_add_nothing_take_less():
    assert run(framework="NeMo 24.12", date="2025-01").adds_in_products
    assert not run(framework="Megatron-DeepSpeed", date="2022-03").adds_in_products
    assert run(framework="Megatron-DeepSpeed", date="2022-03").by_hand

    def seconds(framework):
        of = replace(GPT, layers=2)
        # Compiled, so that element-wise kernels are alike.
        with ProfileStore(":memory:") as store, without("host"):
            job = run(framework=framework, date="2025-01", compile="yes", dp_kind="zero1")
            return figures(job, of, store, whole=True)[0]["predicted_step_s"]

    assert seconds("NeMo") < seconds("PyTorch")


def test_stored_scores_attend_as_the_fused_kernel_does():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8, 16)
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention_of_scores(q, k, v), fused)


def test_stored_scores_are_captured_as_stored_in_16_bits_and_dropped():
    """Capture turns attention that is written as a softmax into the fused operator; dropout is of the
    embedding, the weights and both sums."""
    model, inputs = build(GPT, 2, 32, Variant(stored_scores=True, dropout=0.1))
    graph = capture(model, inputs, {}, dtype="bfloat16").graph
    scores = [op for op in graph.operators if op.target == "aten._softmax.default"]
    assert len(scores) == GPT.layers
    assert {graph.tensors[op.outputs[0]].dtype for op in scores} == {"bfloat16"}
    assert [op.target for op in graph.operators].count("aten.dropout.default") == 1 + 3 * GPT.layers


def test_a_gpu_without_bfloat16_computes_it_as_float16():
    (kind,) = cluster_of(run(gpu="V100-32GB", n_gpus="8", dp="8")).device_kinds
    assert kind.flops["bfloat16"] == kind.flops["float16"]
    assert kind.memory_bytes == device_kind("V100-32GB").memory_bytes
