"""Training adapters by a plan; every function returns plain data."""

import json
from pathlib import Path

import torch
from peft import PeftModel

import tensoropt
from tensoropt.question.model_source import load_model


def train(rank, world, plan, source, batch, folder, steps):
    """Losses by a plan and of one process; then the adapters, read from where they were saved."""
    ours, plain = (load_model(source, batch=batch) for _ in range(2))
    model = tensoropt.parallelize(ours.model, plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain.model)]
    far = []
    for _ in range(steps):
        losses = []
        for each, optimizer in zip((model, plain.model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = each(*ours.args, **ours.kwargs)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        far.append(abs(losses[0] - losses[1]))
    tensoropt.save_pretrained(model, folder)
    base = load_model(source.partition("&lora=")[0], batch=batch)
    read = PeftModel.from_pretrained(base.model.network, folder)
    wanted = plain.model.network.state_dict()
    adapters = {key: value for key, value in read.state_dict().items() if ".lora_" in key}
    apart = max(float((value - wanted[key]).abs().max()) for key, value in adapters.items())
    return {
        "far": max(far),
        "fell": losses[1] < float(load_model(source, batch=batch).model(*ours.args, **ours.kwargs)),
        "apart": apart,
        "files": sorted(file.name for file in Path(folder).iterdir()),
        "rank": json.loads((Path(folder) / "adapter_config.json").read_text())["r"],
    }
