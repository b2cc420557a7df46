"""What launchers are told is read as they mean it, and nothing that they are told is dropped."""

from __future__ import annotations

import pytest

from tensoropt.launchers import LAUNCHERS, JobError, LaunchedJob, read_job

TITAN = """
[model]
name = "llama3"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
{training}
[parallelism]
data_parallel_shard_degree = -1
{parallelism}
[activation_checkpoint]
mode = "{mode}"
"""


def titan(parallelism: str = "", training: str = "", mode: str = "full") -> LaunchedJob:
    text = TITAN.format(parallelism=parallelism, training=training, mode=mode)
    return LAUNCHERS["torchtitan"].read(text)


def megatron(text: str) -> LaunchedJob:
    return read_job(f"megatron:{text}")


def read(launcher: str, text: str) -> LaunchedJob:
    return LAUNCHERS[launcher].read(text)


def test_torchtitan_shards_over_what_other_degrees_leave():
    job = titan("tensor_parallel_degree = 4\ndata_parallel_replicate_degree = 2")
    on = job.on(32)
    assert (on.data, on.tensor, on.replicas, on.shard_group, on.stage) == (8, 4, 2, 4, 3)
    assert on.sequence_parallel
    assert on.root_once
    assert (job.sequence, job.dtype, job.batch_on(32)) == (8192, "bfloat16", 16)
    assert on.micro_batches_of(64) == 4
    assert job.recompute == "full"
    assert not job.notes


def test_what_is_switched_off_is_no_note():
    text = "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = {}\nfilter_fqns = ['output']\n"
    assert not read("torchtitan", text.format("false")).notes
    (note,) = read("torchtitan", text.format("true")).notes
    assert note.endswith("quantize.linear.float8.enable_fsdp_float8_all_gather = True")


def test_torchtitan_recomputes_selectively_unless_told_otherwise():
    job = read("torchtitan", "[parallelism]\n")
    assert (job.recompute, job.every) == ("full", 2)
    job = read("torchtitan", '[activation_checkpoint]\nselective_ac_option = "op"\n')
    assert (job.recompute, job.every) == ("products/2", 1)


def test_a_pipeline_of_torchtitan_keeps_parameters_gathered():
    job = titan("pipeline_parallel_degree = 4\npipeline_parallel_schedule = 'Interleaved1F1B'")
    assert (job.places, job.stages_per_place, job.schedule, job.stage) == (4, 2, "interleaved_1f1b", 2)
    assert any("ZeRO-2" in note for note in job.notes)
    # Two samples a rank, one at a time.
    assert (job.micro_batch, job.micro_batches) == (1, 2)


@pytest.mark.parametrize(("launcher", "text", "words"), [
    ("torchtitan", "[float8]\nrecipe_name = 'rowwise'\n", "float8.recipe_name = rowwise"),
    ("torchtitan", "[training]\nenable_cpu_offload = true\n", "enable_cpu_offload"),
    ("torchtitan", "[parallelism]\npipeline_parallel_schedule = 'DualPipeV'\n", "DualPipeV is unknown"),
    ("megatron", "--fp8-format hybrid", "fp8-format = hybrid"),
    ("megatron", "--bf16 --moe-grouped-gemm", "moe-grouped-gemm = True"),
    ("deepspeed", '{"zero_optimization": {"offload_param": {"device": "cpu"}}}',
     "offload_param.device = cpu"),
    ("deepspeed", '{"compression_training": {"weight_quantization": 1}}', "weight_quantization = 1"),
    ("accelerate", "distributed_type: FSDP\nmixed_precision: fp8\n", "fp8"),
    ("accelerate", "distributed_type: FSDP\nfp8_config:\n  backend: TE\n", "fp8_config.backend = TE"),
])  # fmt: skip
def test_what_costs_and_cannot_be_said_is_noted(launcher, text, words):
    assert any(words in note for note in read(launcher, text).notes)


def test_megatron_splits_what_tensor_and_pipeline_leave():
    job = megatron(
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers 32 "
        "--num-layers-per-virtual-pipeline-stage 4 --sequence-parallel --use-distributed-optimizer "
        "--micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 --recompute-activations"
    )
    on = job.on(64)
    assert (on.data, on.tensor, on.places, on.stages_per_place, on.stage) == (2, 8, 4, 2, 1)
    assert (on.micro_batches_of(64), on.schedule) == (32, "interleaved_1f1b")
    assert on.sequence_parallel
    assert on.gathered_inputs
    assert on.recompute == "attention core"
    assert job.dtype == "bfloat16"


def test_megatron_recomputes_the_first_blocks_of_each_stage():
    job = megatron("--recompute-granularity full --recompute-method block --recompute-num-layers 3")
    assert (job.recompute, job.first) == ("full", 3)


def test_megatrons_arguments_may_stand_in_a_script(tmp_path):
    script = tmp_path / "pretrain.sh"
    arguments = "--tensor-model-parallel-size 2 \\\n  --micro-batch-size 4 # small\n"
    script.write_text(f"torchrun pretrain_gpt.py \\\n  {arguments}")
    assert read_job(f"megatron:{script}").tensor == 2
    with pytest.raises(JobError, match="a script's variables are not expanded"):
        megatron("--tensor-model-parallel-size $TP")


def test_deepspeed_has_a_stage_and_two_of_three_batch_sizes():
    job = read(
        "deepspeed",
        '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true},'
        ' "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}',
    )
    on = job.on(8)
    assert (on.data, on.stage, on.dtype, on.optimizer) == (8, 3, "bfloat16", "adam_fused")
    assert on.micro_batches_of(64) == 4


def test_what_deepspeed_leaves_to_the_script_is_said():
    job = read("deepspeed", '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}')
    assert job.batch_on(8) is None
    assert any("the batch" in note for note in job.notes)


FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_activation_checkpointing: true
parallelism_config:
  parallelism_config_tp_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_dp_replicate_size: 2
"""


@pytest.mark.parametrize(("reshard", "stage"), [("true", 3), ("false", 2), ("SHARD_GRAD_OP", 2)])
def test_accelerate_says_fsdp_in_two_versions(reshard, stage):
    job = read("accelerate", FSDP.format(reshard=reshard)).on(16)
    assert (job.data, job.tensor, job.replicas, job.stage) == (8, 2, 2, stage)
    assert (job.recompute, job.dtype) == ("full", "bfloat16")


def test_accelerate_without_fsdp_is_data_parallel():
    job = read("accelerate", "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: 'no'\n").on(8)
    assert (job.data, job.stage, job.dtype) == (8, 0, "float32")


def test_a_job_for_other_devices_is_refused():
    with pytest.raises(JobError, match=r"tensor 8.* is not 4 devices; name a cluster"):
        megatron("--tensor-model-parallel-size 8").on(4)
    with pytest.raises(JobError, match="which do not divide a batch of 6"):
        megatron("--micro-batch-size 4").on(1).micro_batches_of(6)


@pytest.mark.parametrize(("text", "words"), [
    ("torchtitn:job.toml", "did you mean 'torchtitan'"),
    ("torchtitan:missing.toml", "cannot read the file"),
    ("deepspeed", "give torchtitan:job.toml"),
])  # fmt: skip
def test_what_names_no_job_says_what_would(text, words):
    with pytest.raises(JobError, match=words):
        read_job(text)


@pytest.mark.parametrize("launcher", ["torchtitan", "deepspeed", "accelerate"])
@pytest.mark.parametrize("text", ["[[", "[" * 100_000])
def test_what_is_no_config_is_refused(launcher, text):
    with pytest.raises(JobError, match=launcher):
        read(launcher, text)


def test_recipes_are_those_of_the_planner():
    from tensoropt.launchers import job, megatron, torchtitan
    from tensoropt.sharding.recipes import FULL, NOTHING, RECIPES

    assert (job.FULL, job.NOTHING) == (FULL, NOTHING)
    assert {torchtitan._PER_OPERATOR, megatron._CORE, megatron._FUNCTIONS} <= set(RECIPES)
