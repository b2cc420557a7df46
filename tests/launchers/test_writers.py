"""What is written has the launchers' own names and words, and accelerate's parser reads it as it is meant."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tensoropt.launchers import LAUNCHERS, JobError, LaunchedJob, read_job, write_job
from tensoropt.launchers.job import Launcher, _flat
from tensoropt.launchers.megatron import _arguments
from tensoropt.launchers.torchtitan import _SCHEDULES

KEPT = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text())
PARSERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "torchtitan": tomllib.loads,
    "megatron": _arguments,  # type: ignore[dict-item]
    "deepspeed": json.loads,
    "accelerate": yaml.safe_load,
}
DEGREES = ("tensor", "context", "experts", "places", "stages_per_place", "replicas")
DETAILS: tuple[dict[str, Any], ...] = (
    {},
    {"micro_batches": 2, "batch": 64, "sequence": 128, "dtype": "bfloat16"},
    {"batch": 64, "every": 2, "recompute": "full", "ring": True},
    {"batch": 64, "first": 2, "recompute": "full", "ring": True},
)


def jobs() -> Iterator[LaunchedJob]:
    """Jobs of all kinds, whether or not somebody can be told them."""
    like = LaunchedJob(launcher="", data=8, recompute="every", block_classes=("GPT2Block",), nodes=2)
    for degree, stage, along, detail in product((None, *DEGREES), range(4), (True, False), DETAILS):
        varied = replace(like, stage=stage, sequence_parallel=along, **detail)
        yield varied if degree is None else replace(varied, **{degree: 2})
    for schedule in _SCHEDULES.values():
        yield replace(like, places=2, schedule=schedule, batch=64, micro_batches=4)


def written(launcher: Launcher) -> Iterator[tuple[LaunchedJob, str]]:
    """What is written of all kinds of jobs, each once."""
    seen = set()
    for job in jobs():
        for variant in (job, *launcher.variants(job)):
            own = replace(variant, launcher=launcher.name)
            if own not in seen and not launcher.refusal(own):
                seen.add(own)
                yield own, write_job(own)


@pytest.mark.parametrize("name", KEPT)
def test_names_and_words_are_those_of_the_launcher(name):
    known, used = KEPT[name]["names"], set()
    for _, text in written(LAUNCHERS[name]):
        for key, value in _flat(PARSERS[name](text)).items():
            assert key in known, f"{key} is no name of {name} {KEPT[name]['versions']}"
            used.add(key)
            if known[key] is not None:
                assert set(value.split() if isinstance(value, str) else [value]) <= set(known[key])
    assert used == known.keys(), "a name that is kept and never written"


def test_other_launchers_than_the_kept_have_their_parser_here():
    assert LAUNCHERS.keys() - KEPT.keys() == {"accelerate"}


@pytest.mark.parametrize("launcher", LAUNCHERS.values(), ids=lambda launcher: launcher.name)
def test_what_is_written_is_read_again(launcher):
    job = LaunchedJob(
        launcher=launcher.name, data=4, tensor=2, stage=3, sequence_parallel=True, recompute="full", batch=32,
        micro_batches=2, sequence=128, dtype="bfloat16", root_once=True, gathered_inputs=True,
    )  # fmt: skip
    # What a config does not say is the script's.
    unsaid = {
        "deepspeed": {"recompute", "sequence", "root_once"},
        "megatron": {"root_once"},
        "accelerate": {"sequence", "batch"},
    }
    own = {"notes", "micro_batch", "optimizer", "micro_batches", *unsaid.get(launcher.name, ())}
    for variant in (one for one in launcher.variants(job) if not launcher.refusal(one)):
        again = launcher.read(write_job(variant)).on(8)
        for field in fields(LaunchedJob):
            if field.name not in own:
                assert getattr(again, field.name) == getattr(variant, field.name), field.name
        if launcher.name != "accelerate":
            assert again.micro_batches_of(32) == 2


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_data_parallelism_is_near_everything(name):
    """Whatever the degrees and the stage, there is a job that can be told, of which each rank has samples."""
    for stage in range(4):
        job = LaunchedJob(launcher="", data=2, tensor=4, stage=stage, batch=8, micro_batches=4)
        for one in (job, replace(job, data=8, tensor=1, micro_batches=1)):
            near = [like for like in LAUNCHERS[name].variants(one) if not LAUNCHERS[name].refusal(like)]
            assert near
            assert all((like.data, like.micro_batches) == (8, 1) for like in near)


def test_what_a_launcher_cannot_be_told_is_refused():
    ring = LaunchedJob(launcher="deepspeed", data=2, context=2)
    with pytest.raises(JobError, match="deepspeed cannot express context parallelism"):
        write_job(ring)
    steps = LaunchedJob(launcher="accelerate", data=2, stage=2, micro_batches=2)
    with pytest.raises(JobError, match="accelerate cannot express ZeRO-2: its FSDP gathers"):
        write_job(steps)


@pytest.mark.parametrize("stage", [2, 3])
def test_megatrons_fsdp_starts_with_its_own_checkpoints_only(stage):
    text = write_job(LaunchedJob(launcher="megatron", data=4, stage=stage))
    assert "--use-megatron-fsdp" in text
    assert "--ckpt-format fsdp_dtensor" in text
    assert "ckpt-format" not in write_job(LaunchedJob(launcher="megatron", data=4, stage=1))


@pytest.mark.parametrize("word", ["all_gather", "allgather"])
def test_megatron_gathers_keys_and_values_in_either_spelling(word):
    job = read_job(f"megatron:--context-parallel-size 2 --cp-comm-type {word}")
    assert not job.ring
    assert not [note for note in job.notes if "cp-comm-type" in note]
    assert "--cp-comm-type all_gather" in write_job(job.on(2))


@pytest.mark.parametrize(("name", "words"), [
    ("megatron", ("core_v0.15", "--num-layers", "--data-path")),
    ("torchtitan", ("0.2.0 to 0.2.2", "0.3 reads no TOML", "[model]")),
    ("accelerate", ("1.15", "the model", "4 samples")),
])  # fmt: skip
def test_what_is_written_says_what_it_is_for_and_what_is_missing(name, words):
    text = write_job(LaunchedJob(launcher=name, data=4, batch=16))
    above = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert text.startswith(above)
    for word in words:
        assert word in above


def of_accelerate(text: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``accelerate launch`` makes of a config: its arguments, with the environment of the script set."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_multi_gpu_env

    path.write_text(text)
    words = ["--config_file", str(path), "--main_process_ip", "first", "--main_process_port", "1", "train.py"]
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    return args


def test_accelerates_own_parser_reads_every_name(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    known = {action.dest for action in launch_command_parser()._actions}
    for _, text in written(LAUNCHERS["accelerate"]):
        (tmp_path / "fsdp.yaml").write_text(text)
        # It refuses names at the top that it does not know.
        config = load_config_from_file(str(tmp_path / "fsdp.yaml"))
        assert known.issuperset(config.fsdp_config)
        assert known.issuperset(config.parallelism_config)


@pytest.mark.parametrize("stage", [2, 3])
def test_accelerate_shards_as_it_is_told(stage, tmp_path, monkeypatch):
    accelerate = pytest.importorskip("accelerate")
    job = LaunchedJob(
        launcher="accelerate", data=8, replicas=2, stage=stage, recompute="full", dtype="bfloat16", nodes=2,
        block_classes=("GPT2Block", "Head"),
    )  # fmt: skip
    args = of_accelerate(write_job(job), tmp_path / "fsdp.yaml", monkeypatch)
    assert (args.use_fsdp, args.num_processes, args.num_machines) == (True, 8, 2)
    assert args.mixed_precision == "bf16"
    plugin = accelerate.FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is (stage == 3)
    assert plugin.activation_checkpointing
    assert plugin.transformer_cls_names_to_wrap == ["GPT2Block", "Head"]
    degrees = accelerate.parallelism_config.ParallelismConfig()
    assert (degrees.dp_replicate_size, degrees.dp_shard_size, degrees.tp_size) == (2, 4, 1)


def test_accelerate_without_shards_is_data_parallel(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    text = write_job(LaunchedJob(launcher="accelerate", data=2))
    args = of_accelerate(text, tmp_path / "ddp.yaml", monkeypatch)
    assert (args.use_fsdp, args.multi_gpu, args.num_processes) == (False, True, 2)
