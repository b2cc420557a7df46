"""Plans of models with adapters, run beside one process."""

import pytest

import tensoropt
from tensoropt.question.model_source import load_model

pytest.importorskip("peft")
from tests.execute import lora_jobs

LORA, BATCH = "lora=r=4,alpha=8,targets=q_proj+down_proj", 4
SOURCES = {
    "numbers": f"zoo:llama-tiny?layers=1&{LORA}",
    "bytes": f"zoo:llama-tiny?layers=1&hidden=128&inner=256&{LORA},base=nf4-double",
}


@pytest.mark.sweep
@pytest.mark.parametrize("base", SOURCES)
def test_losses_are_those_of_one_process_and_adapters_are_saved(base, ranks, tmp_path):
    source = SOURCES[base]
    found = tensoropt.explore(
        load_model(source, batch=BATCH),
        cluster="cpu:2", measure="never", micro_batches=[1], recompute="never",
        placements="never", pipelines="never",
    )  # fmt: skip
    for row in {0, len(found.points) - 1}:
        plan, folder = tmp_path / f"{row}.json", tmp_path / f"adapters-{row}"
        found.plan(row).save(plan)
        for trained in ranks.run(lora_jobs.train, str(plan), source, BATCH, str(folder), 5):
            assert trained["far"] < 2e-5, found.names[row]
            assert trained["fell"]
            assert trained["apart"] < 2e-4
            assert {"adapter_config.json", "adapter_model.safetensors"} <= {*trained["files"]}
            assert trained["rank"] == 4
