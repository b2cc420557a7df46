"""What is done with a parallelized model as a plain module; every function returns plain data."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

import tensoropt
from tests.execute.habit_jobs import Mesh, parallel
from tests.execute.jobs import build, loss_of, refusal


def whole_model(rank: int, world: int, name: str, mesh: Mesh, seed: int) -> dict[str, Any]:
    """The plain module after a training step, beside one process; then a further step of both."""
    model, args, kwargs = parallel(name, mesh, seed)
    plain, _, _ = build(name)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]

    def step() -> float:
        far = abs(float(loss_of(model(*args, **kwargs))) - float(loss_of(plain(*args, **kwargs))))
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each(*args, **kwargs)).backward()
            optimizer.step()
        return far

    found: dict[str, Any] = {"first": step()}
    with tensoropt.whole(model) as copied:
        state, expected = copied.state_dict(), plain.state_dict()
        found["keys"] = list(state) == list(expected)
        found["plain"] = {type(p) for p in copied.parameters()} == {nn.Parameter}
        found["apart"] = not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        found["values"] = max(
            float((state[key].float() - expected[key].float()).abs().max()) for key in state
        )
        if rank == 0:  # alone
            # A call changes buffers, of the copy alone.
            beside = copy.deepcopy(plain)
            found["called"] = abs(
                float(loss_of(copied(*args, **kwargs))) - float(loss_of(beside(*args, **kwargs)))
            )
            copied.double()
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
    found["second"] = step()
    return found


def generated(rank: int, world: int, mesh: Mesh, folder: str) -> dict[str, Any]:
    """Text of a model of transformers, and what it is when it is read from where it was saved."""
    model, _, kwargs = parallel("gpt2_ignored", mesh)
    plain, _, _ = build("gpt2_ignored")
    prompt = kwargs["input_ids"][:1, :4]
    with tensoropt.whole(model, "cpu") as copied, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ours, expected = (
            m.eval().generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
            for m in (copied, plain)
        )
    tensoropt.save_pretrained(model, folder)
    read = type(plain).from_pretrained(folder).train()
    other, _, _ = parallel("mlp", (1, world))
    return {
        "same": ours.tolist() == expected.tolist(),
        "read": abs(float(read(**kwargs).loss) - float(plain.train()(**kwargs).loss)),
        "other": refusal(lambda: tensoropt.save_pretrained(other, folder)),
    }
