"""Published memory: what rows leave out, formulas of a paper, what an allocator is asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tensoropt.profiling.store import ProfileStore
from tests.benchmarks.published import memory
from tests.benchmarks.published.decoder import Architecture, parameters_of
from tests.benchmarks.published.memory import GIB, load_memory, markdown, measure, medians
from tests.benchmarks.published.predict import simulate_run
from tests.benchmarks.published.runs import Run, load_models
from tests.benchmarks.published.test_published import GPT as DECODER
from tests.benchmarks.published.test_published import small

COLUMNS = (
    "id,source,model,seq_len,micro_batch_per_gpu,n_gpus,gpu,dp,dp_kind,tp,seq_parallel,pp,pp_schedule,"
    "virtual_stages,cp,recompute,precision,compile,what,memory_gib,meter,tokens_per_s_per_gpu,notes"
)
MEGATRON = (
    "m-1,arXiv 2205.05198 figure 1,small,32,4,2,A100-80GB,1,none,2,no,1,none,1,1,none,fp16,no,activations,"
    "1.0,read off the figure,,"
)
TITAN = (
    "t-1,torchtitan benchmarks,small,64,2,4,H100-96GB-500W,4,zero3 over dp x cp,1,no,1,none,1,1,full,"
    "float8 products,yes,peak,1.0,max reserved,,"
)
GPT = replace(DECODER, layers=2)
LLAMA = replace(GPT, gated=True, tied=False, pos="rope", bias=False)


def run(line: str, tmp_path, **changed: str) -> Run:
    path = tmp_path / "memory.csv"
    path.write_text(f"{COLUMNS}\n{line}\n", encoding="utf-8")
    (one,) = load_memory(path)
    return Run({**one.row, **changed})


def test_what_rows_leave_out_is_known_by_their_sources(tmp_path):
    megatron, titan = run(MEGATRON, tmp_path), run(TITAN, tmp_path)
    assert (megatron.variant.dropout, megatron.variant.stored_scores) == (0.1, True)
    assert (titan.dp_kind, titan.precision, titan.variant.dropout) == ("zero3", "bf16", 0.0)
    assert titan.number("global_batch_seqs") == 8
    # A rank's batch is cut into as many micro-batches as there are places; parameters stay unsharded.
    piped = run(TITAN.replace(",4,zero3 over dp x cp,1,no,1,none,1,", ",1,zero3,1,no,2,1f1b,1,"), tmp_path)
    assert (piped.number("micro_batch_per_gpu"), piped.number("grad_accum"), piped.dp_kind) == (1, 2, "zero1")


def test_the_22b_model_has_the_parameters_of_its_numbers():
    of = Architecture.of(load_models(memory.MODELS)["megatron-gpt-22b"])
    assert parameters_of(of, 2048) == of.params


def kept_by_a_block(run: Run, of: Architecture) -> float:
    """Bytes that one more block adds."""
    (recipe,) = run.recomputed
    with ProfileStore(":memory:") as store:
        fewer, more = (
            memory.kept_bytes(
                simulate_run(run, replace(of, layers=n), store, recipe=recipe),
                0,
                partial(memory.less_where_gathered_again, run),
            )
            for n in (2, 3)
        )
    return more - fewer


@pytest.mark.sweep
@pytest.mark.parametrize(("parallel", "recompute"), [("no", "none"), ("yes", "selective (attention core)")])
def test_a_block_keeps_what_the_paper_counts(tmp_path, parallel, recompute):
    # On a small model scattering takes longer than keeping all of the sequence.
    one = run(MEGATRON, tmp_path, seq_parallel=parallel, recompute=recompute, seq_len="2048")
    of = replace(GPT, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=16384)
    s, b, h, a, t = 2048, 4, of.hidden, of.heads, 2
    if parallel == "no":
        expected = s * b * h * (10 + 24 / t + 5 * a * s / (h * t))  # equation 2
    else:
        # Equation 6, but for what attention itself makes: it is made again, which Megatron-LM keeps.
        expected = s * b * h * (34 - 2) / t
    # Beside it statistics of norms.
    assert kept_by_a_block(one, of) == pytest.approx(expected, rel=0.02)


def test_megatron_has_18_bytes_for_a_parameter(tmp_path):
    one = run(MEGATRON, tmp_path, what="parameters and optimizer", tp="1", n_gpus="1")
    of, models = small(GPT, 32)
    with ProfileStore(":memory:") as store:
        row = measure(one, models, store)
    positions = 32 * of.hidden
    assert row["predicted_bytes"] == pytest.approx(18 * (of.params + positions), rel=1e-3)


@pytest.mark.slow
def test_a_peak_is_what_an_allocator_reserves(tmp_path):
    _, models = small(replace(LLAMA, layers=3), 64)
    with ProfileStore(":memory:") as store:
        row = measure(run(TITAN, tmp_path), models, store)
        lasting = measure(run(TITAN, tmp_path, what="parameters and optimizer"), models, store)
        assert "not in the file" in measure(run(TITAN, tmp_path), {}, store)["refused"]
    assert row["refused"] is None
    assert row["predicted_bytes"] > memory.RESERVED_EXPANDABLE * lasting["predicted_bytes"]
    assert row["notes"] == ["products in bfloat16, where the run's are in float8"]


def test_medians_and_the_page_are_by_what_was_measured():
    def row(what, predicted, refused=None):
        return {
            "id": "m", "model": "small", "what": what, "meter": "eye", "refused": refused,
            "predicted_bytes": predicted and predicted * GIB, "published_bytes": 10 * GIB, "notes": ["so"],
        }  # fmt: skip

    rows = [row("peak", 11), row("peak", 9.5), row("activations", 10), row("peak", None, "why")]
    found = medians(rows)
    assert found["all"]["runs"] == 3
    assert found["all"]["median_error"] == pytest.approx(0.05)
    assert found["peak (eye)"]["worst_error"] == pytest.approx(0.1)
    page = markdown({"date": "2026-01-01", "commit": "c", "machine": {}, "medians": found, "rows": rows})
    assert "| m | small | peak | 9.50 | 10.00 | -5.0% |" in page
    assert "| m | small | peak |  | 10.00 | why |" in page
    assert "- 4 runs: so" in page
