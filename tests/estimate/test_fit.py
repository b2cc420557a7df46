"""What ``fit`` answers: rows, the largest sizes that fit, words, refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import tensoropt
from tensoropt import zoo
from tensoropt.cli.parser import main
from tensoropt.errors import TensorOptError
from tensoropt.estimate.fit import KINDS, Fit, devices, fit
from tensoropt.estimate.known import figures, known_model, known_names
from tensoropt.estimate.strategies import RECOMPUTE

GIB = 2.0**30
_LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip

_GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 64, "vocab_size": 9}


def row(found: Fit, title: str, recompute: str = "none"):
    (one,) = (r for r in found.rows if (r.strategy.title, r.strategy.recompute) == (title, recompute))
    return one


def test_a_large_model_needs_shards_and_recomputation_on_small_cards() -> None:
    found = fit("llama3-8b", "8x24GiB", batch=8, sequence=2048)
    # 8.03 billion parameters of 16 bytes, and 4 more while Adam updates.
    ddp = row(found, "DDP")
    assert ddp.memory_bytes - ddp.process == pytest.approx(20 * 8.03e9, rel=0.001)
    assert ddp.parts["activations"] == 0
    assert not ddp.fits
    assert ddp.largest_batch is ddp.largest_sequence is None
    assert found.best is row(found, "FSDP (ZeRO-3)", "full")
    assert found.sentence() == (
        f"Fits with FSDP (ZeRO-3), layers recomputed: {found.best.memory_bytes / GIB:.3g} GiB of 24 GiB a "
        f"device. DDP needs {ddp.memory_bytes / GIB:.3g} GiB. It is tight: jobs took more than "
        "predicted by as much as is left."
    )


def test_what_recomputation_alone_would_save_is_said() -> None:
    found = fit("llama3-8b", "dgx-h100", batch=8)
    least = row(found, "DDP", "full").memory_bytes / GIB
    assert found.sentence().endswith(f"GiB, with layers recomputed {least:.3g} GiB.")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3-8b", "gpt2", "mixtral-tiny", "vgg16"])
def test_the_largest_batch_and_sequence_fit_and_one_more_does_not(model: str) -> None:
    found = fit(model, "4x80GiB")
    seen = 0
    for one in found.rows:
        each = one.strategy.data
        where = (one.strategy.title, one.strategy.recompute)
        if one.largest_batch:
            seen += 1
            assert row(fit(model, "4x80GiB", batch=one.largest_batch), *where).fits
            assert not row(fit(model, "4x80GiB", batch=one.largest_batch + each), *where).fits
        if one.largest_sequence:
            assert row(fit(model, "4x80GiB", sequence=one.largest_sequence), *where).fits
            assert not row(fit(model, "4x80GiB", sequence=one.largest_sequence + 1), *where).fits
    assert seen


def test_parts_add_up_and_each_stage_needs_less() -> None:
    found = fit("gpt2-xl", "dgx-h100", batch=8)
    for one in found.rows:
        assert tuple(one.parts) == KINDS
        assert one.memory_bytes == pytest.approx(sum(one.parts.values()))
    for recompute in RECOMPUTE:
        sizes = [row(found, t, recompute).memory_bytes for t in ("DDP", "ZeRO-1", "ZeRO-2", "FSDP (ZeRO-3)")]
        assert sizes == sorted(sizes, reverse=True)
    for title in ("DDP", "ZeRO-2", "FSDP (ZeRO-3)"):
        sizes = [row(found, title, recompute).memory_bytes for recompute in RECOMPUTE]
        assert sizes == sorted(sizes, reverse=True)


def test_optimizers_dtypes_and_micro_batches_change_what_they_should() -> None:
    def parts(**chosen):
        return row(fit("gpt2-xl", "dgx-h100", batch=64, **chosen), "DDP").parts

    adam, sgd, wide = parts(), parts(optimizer="sgd"), parts(dtype="float32")
    assert adam["optimizer"] == 2 * adam["parameters"]
    assert sgd["optimizer"] == 0
    assert wide["parameters"] == adam["parameters"]
    assert wide["activations"] > adam["activations"]
    assert parts(micro_batches=4)["activations"] == pytest.approx(adam["activations"] / 4)


def test_one_device_and_none_that_fits_are_said() -> None:
    assert fit("gpt2", "24GiB", batch=4).sentence().startswith("Fits on one device: ")
    none = fit("llama3-70b", "4x24GiB").sentence()
    assert none.startswith("None of these strategies fits. The leanest, FSDP (ZeRO-3), layers recomputed, ")
    assert none.endswith("No batch fits; use more or larger devices.")
    smaller = fit("gpt2", "24GiB", batch=512).sentence()
    assert "With it a batch of " in smaller
    assert " or a sequence of " in smaller


def test_a_batch_smaller_than_the_devices_is_refused_with_the_least() -> None:
    found = fit("gpt2", "dgx-h100", batch=4)
    assert row(found, "DDP").refusal == "needs a batch of 8 or more: a sample for each of 8 devices"
    assert found.best is not None
    assert found.best.strategy.tensor > 1


def test_devices_by_number_kind_and_memory() -> None:
    assert devices("8xH100-80GB").name == "dgx-h100"
    assert devices("16×H100-80GB").name == "dgx-h100x2"
    assert devices("4xA100-80GB").name == "dgx-a100[4]"
    assert [level.size for level in devices("32xT4").levels] == [4, 8]
    assert devices("24GiB").memory_bytes == 24 * GIB
    assert devices("2 x 24 GB").memory_bytes == 24e9
    assert devices("dgx-a100x2").device_count == 16
    with pytest.raises(TensorOptError, match="unknown cluster '8xH100'"):
        devices("8xH100")
    with pytest.raises(TensorOptError, match="at least 1"):
        devices("0x24GiB")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"batch": 0}, "batch 0 is not between 1"),
        ({"sequence": 1 << 30}, "sequence 1,073,741,824 is not between"),
        ({"optimizer": "adamw"}, "unknown optimizer 'adamw'; did you mean 'adam'"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
        ({"model": "lama3"}, "did you mean 'llama3-8b'"),
        ({"model": "zoo:gpt2?lora=r=4"}, "trains its adapters alone, .* explore it"),
        ({"model": "vgg16", "sequence": 8}, "reads no sequence"),
        ({"model": _GPT2, "sequence": 65}, "has 64 positions"),
        ({"model": "vgg16?image=64"}, "leave out \\?image=64"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_the_rule(chosen: dict, words: str) -> None:
    with pytest.raises(TensorOptError, match=words):
        fit(**{"model": "gpt2", "cluster": "8x24GiB", **chosen})


def test_options_of_the_zoo_change_the_sizes() -> None:
    plain = known_model("gpt2")
    assert known_model("zoo:gpt2?sequence=512").parameters == plain.parameters - 512 * 768
    assert known_model("gpt2?layers=6").parameters == plain.parameters - 6 * 7_087_872


def test_a_config_names_the_model_that_the_search_opens() -> None:
    found = fit(_LLAMA, "8xH100-80GB")
    assert "'zoo:llama3-8b?layers=32&hidden=4096&" in found.explore_command()
    assert known_model(found.model.source).parameters == found.model.parameters
    assert not fit({**_LLAMA, "attention_bias": True}, "8xH100-80GB").explore_command()
    assert not fit(_LLAMA, "8x24GiB").explore_command()


def test_command_line_python_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "gpt2", "--cluster", "4xRTX-4090", "--batch", "32"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    found = tensoropt.fit("gpt2", "4xRTX-4090", batch=32)
    assert printed.startswith(f"{found.question}\n{found.sentence()}\n")
    assert all(said in printed for said in found.assumptions())
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(found.to_data()))
    assert main([*words[:-1], "0"]) == 2


def test_how_far_estimates_are_off_is_kept_and_said() -> None:
    kept = figures()["accuracy"]
    assert 0 < kept["median"] <= kept["worst"] <= 0.1
    assert f"{kept['count']:,} strategies" in fit("gpt2", "24GiB").accuracy


def test_models_that_are_kept_are_those_of_the_zoo() -> None:
    entries = {entry.name: entry for entry in zoo.list_models()}
    assert set(known_names()) <= set(entries)
    # All that have a config; the others as far as they were counted.
    assert {name for name, entry in entries.items() if entry.requires} <= set(known_names())


def test_an_answer_needs_no_pytorch() -> None:
    code = (
        "import sys, tensoropt; tensoropt.fit('llama3-8b', '8x24GiB').table(); "
        "sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
