"""Whether published jobs fitted: what rows leave out, what frameworks keep, meters, right layouts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import yaml

from tensoropt.profiling.store import ProfileStore
from tensoropt.simulate.step import NamedBytes
from tests.benchmarks.published import fits
from tests.benchmarks.published.__main__ import main
from tests.benchmarks.published.runs import GIB, Run, completed, load_runs
from tests.benchmarks.published.test_published import GPT, ROW, small

PEAK = {"peak_mem_gib": "1", "peak_mem_kind": "max allocated (torch)"}


def run(**changed: str) -> Run:
    return Run(completed({**ROW, "framework": "", "pp_schedule": "", **changed}))


_, MODELS = small(replace(GPT, layers=2), 32)


def layout(folder, **more: str):
    """A file of a run that only says on what it did not run."""
    cells = dict.fromkeys(ROW, "") | {
        "id": "k-1", "source": "k", "outcome": "oom", "model": "small", "seq_len": "32", "gpu": "A100-80GB",
        "tp": "2", **more,
    }  # fmt: skip
    path = folder / "runs.csv"
    path.write_text("\n".join(map(",".join, (cells.keys(), cells.values()))), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("what", ["both", "memory"])
def test_a_file_of_layouts_alone_is_predicted(tmp_path, monkeypatch, capsys, what):
    models = tmp_path / "models.yaml"
    models.write_text(yaml.safe_dump(MODELS), encoding="utf-8")
    runs, out = layout(tmp_path, n_gpus="4"), tmp_path / "out"
    files = ["--runs", str(runs), "--models", str(models), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["published", *files, "--what", what, "--processes", "1", "--json"])
    main()
    data = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in data["memory_rows"]] == ["fits"]
    assert data["memory"]["layouts"]["oom"] == {"layouts": 1, "right": 0, "fits": 1}
    assert len(list(out.iterdir())) == (3 if what == "both" else 2)


def test_a_row_that_only_says_whether_it_ran_is_completed(tmp_path):
    (one,) = load_runs(layout(tmp_path, n_gpus="16", pp="4"))
    expected = {
        "dp": "2", "grad_accum": "8", "global_batch_seqs": "16", "dp_kind": "ddp", "recompute": "none",
    }  # fmt: skip
    assert {name: one.row[name] for name in expected} == expected
    assert fits.is_of_memory(one)
    assert not fits.is_of_memory(run())
    assert completed(ROW) == ROW


@pytest.mark.parametrize(
    ("said", "meter"),
    [
        ("max allocated (torch) from the log", "torch allocated"),
        ("max reserved (torch)", "torch reserved"),
        ("nvidia-smi GB, highest node", "nvidia-smi"),
        ("GB, nvidia-smi assumed", "nvidia-smi, assumed"),
        ("GB as printed", "unsaid"),
    ],
)
def test_meters_are_told_apart(said, meter):
    assert fits.meter_of(run(**PEAK | {"peak_mem_kind": said})) == meter
    needed = {"allocated": 3.0, "reserved": 4.0, "requested": 2.0, "context": 10.0, "communicators": 20.0}
    shown = 4.0 if "reserved" in meter else 34.0 if "nvidia" in meter else 3.0
    assert fits.by_meter(needed, meter) == shown


@pytest.mark.parametrize(
    ("changed", "each"),
    [
        # 16-bit parameters, their gradients, and 12 bytes of the optimizer on one of four ranks.
        ({"dp_kind": "zero1", "framework": "NeMo"}, 2 + 2 + 3),
        ({"dp_kind": "zero1", "framework": "Megatron-LM"}, 2 + 4 + 3),
        ({"dp_kind": "zero1", "framework": "Megatron-LM", "precision": "fp16"}, 2 + 2 + 3),
        ({"dp_kind": "zero1", "framework": "Megatron-DeepSpeed", "grad_reduce_dtype": "fp32"}, 2 + 6 + 3),
        ({"dp_kind": "zero1", "framework": "somebody's"}, 2 + 2 + 3),
        ({"dp_kind": "ddp", "framework": "Megatron-LM"}, 2 + 4 + 12),
    ],
)
def test_what_a_framework_keeps_of_a_parameter(changed, each):
    sharded = changed["dp_kind"] == "zero1"
    lasting = [400.0, 500.0, 8 * 100.0 / (4 if sharded else 1)]  # of 100 parameters
    assert sum(lasting) + fits.framework_bytes(run(**changed), lasting) == 100 * each
    assert fits.framework_bytes(run(dp_kind="zero3", framework="FSDP"), lasting) == 0


def test_kernels_that_do_more_at_once_keep_less(monkeypatch):
    kept = [
        NamedBytes("", "rms_norm_1", fits.SAVED, "0", "kept", 80),
        NamedBytes("", "silu", "activation", "forward made 0", "kept", 70),
        NamedBytes("", "linear", "activation", "forward made 0", "kept", 1000),
    ]
    monkeypatch.setattr(fits, "kept_between", lambda stage: iter(kept))
    assert fits.less_in_fused_kernels(run(framework="NeMo"), None) == 130
    assert fits.less_in_fused_kernels(run(notes="RMSNorm kernel"), None) == 60
    assert fits.less_in_fused_kernels(run(), None) == 0


@pytest.mark.slow
def test_a_layout_is_right_where_it_is_predicted_to_do_what_it_did():
    with ProfileStore(":memory:") as store:
        ran, failed, unknown = (
            fits.measure(run(**changed), known, store)
            for changed, known in ((PEAK, MODELS), ({"outcome": "oom", "step_s": ""}, MODELS), ({}, {}))
        )
    assert (ran["verdict"], ran["fits"], ran["meter"]) == ("fits", True, "torch allocated")
    assert ran["predicted_bytes"] < ran["needed_bytes"] < ran["device_bytes"]
    assert (failed["verdict"], failed["predicted_bytes"]) == ("fits", None)
    assert "not in the file" in unknown["refused"]
    found = fits.summary([ran, failed, unknown])
    assert found["layouts"] == {
        "ok": {"layouts": 1, "right": 1, "fits": 1},
        "oom": {"layouts": 1, "right": 0, "fits": 1},
    }
    assert found["meters"]["torch allocated"]["runs"] == 1
    page = fits.part({"memory_rows": [ran, failed, unknown], "memory": found})
    assert "Layouts right: 1 of 2." in page
    assert f"| {ran['published_bytes'] / GIB:.1f} |" in page
    assert fits.part({"memory_rows": []}) == ""
