"""Habits of training scripts, on the ranks of a test pool; every function returns plain data."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrize import register_parametrization

import tensoropt
from tensoropt import load_checkpoint, original_shape, parallelize, save_checkpoint
from tensoropt.engine import runtime, script_values
from tests.execute.jobs import (
    Twins,
    build,
    captured_model,
    heard,
    is_pipeline,
    loss_of,
    parallelize_alike,
    refusal,
    strategy_of,
    whole,
)
from tests.models import Call

Mesh = tuple[Any, ...]


def parallel(name: str, mesh: Mesh, seed: int = 3, **more: Any) -> tuple[nn.Module, Any, Any]:
    model, args, kwargs = build(name)
    return parallelize_alike(name, model, mesh, seed, args, kwargs, **more), args, kwargs


# -- what ranks are fed -----------------------------------------------------------------------------------


def unlike(rank, world, mesh, what):
    """What each call of a model says whose ranks are not fed alike; the last one is alike again."""
    model, (x, y), _ = parallel("mlp", mesh)

    def modes() -> None:
        model.train(rank == 0)
        model(x, y)

    calls = {
        "batch": [lambda: model(x + rank, y), lambda: model(x, y + rank)],
        "shape": [lambda: model(x[: len(x) - rank], y), lambda: model(x, y=y.double() if rank else y)],
        "arguments": [lambda: model(x, y, 3) if rank else model(x, y)],
        "mode": [modes],
    }
    said = [refusal(call) for call in calls[what]]
    model.train()
    return [*said, refusal(lambda: model(x, y))]


def unlike_later(rank, world, mesh, calls):
    """The calls that say that ranks are not fed alike, of many in which they are not after the first."""
    model, (x, y), _ = parallel("mlp", mesh)
    with torch.no_grad(), mock.patch.object(runtime, "_EVERY", 10):
        return [i for i in range(calls) if refusal(lambda: model(x + rank * (i > 3), y))]  # noqa: B023


def not_compared(rank, world, mesh):
    model, (x, y), _ = parallel("mlp", mesh, compare_ranks=False)
    return refusal(lambda: model(x + rank, y))


def threads_left(rank, world, mesh):
    """The threads of this rank with models of a job, and after it."""
    for _ in range(3):
        parallel("mlp", mesh)
    before = psutil.Process().num_threads()
    runtime.leave_job()
    return before, psutil.Process().num_threads()


def unread_inputs(rank, world, mesh):
    """Which inputs a rank reads, of a model that another rank feeds with zeros where it reads nothing."""
    model, args, _ = parallel("mlp", mesh)
    reads = model._tensoropt.engine.reads()
    given = [value if read else torch.zeros_like(value) for value, read in zip(args, reads, strict=True)]
    plain, _, _ = build("mlp")
    assert abs(float(model(*given)) - float(plain(*args))) < 1e-5
    return reads


def unlike_weights(rank, world, mesh, what, sync):
    """What parallelize says of weights that differ by rank, and how far the loss is from rank 0's model."""
    name = "moving_average" if what == "buffer" else "mlp"
    model, args, kwargs = build(name)
    plain, _, _ = build(name)
    if rank:
        with torch.no_grad():
            if what == "seed":
                for parameter in model.parameters():
                    parameter.normal_()
            elif what == "one element":
                model.second.weight[3, 5] += 1e-6
            elif what == "buffer":
                model.average.add_(0.5)
            elif what == "dtype":
                model.half()
    strategy = strategy_of(captured_model(name), mesh, 3)
    said = refusal(lambda: parallelize(model, strategy, args, kwargs, sync_weights=sync))
    far = 0.0 if said else abs(float(loss_of(model(*args))) - float(loss_of(plain(*args))))
    return said, far


def refused_on_one(rank, world, mesh, everywhere=False):
    """What parallelize says where a checkpoint is missing on some ranks."""
    path = "/nowhere/weights" if rank or everywhere else None
    return refusal(lambda: parallel("mlp", mesh, checkpoint=path))


# -- what is done after parallelize ----------------------------------------------------------------------


def assign(model: nn.Module) -> None:
    values = {n: torch.randn(v.shape) for n, v in build("mlp")[0].state_dict().items()}
    model.load_state_dict(values, assign=True)


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def checkpointed(model: nn.Module) -> None:
    """As gradient_checkpointing_enable() of transformers does beside its flags."""

    def make_inputs_require_grads(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    model.second.register_forward_hook(make_inputs_require_grads)


def with_lora(model: nn.Module) -> None:
    """As peft puts its layers in the place of a model's."""
    layers = {"base": model.second, "a": nn.Linear(32, 2), "b": nn.Linear(2, 32)}
    model.second = Call(lambda m, x: m.base(x) + m.b(m.a(x)), **layers)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "assign": assign,
    "data": other_data,
    "head": lambda m: setattr(m, "third", nn.Linear(32, 8)),
    "layers": lambda m: m.second.add_module("extra", nn.Linear(2, 2)),
    "away": lambda m: delattr(m, "third"),
    "parameter": lambda m: setattr(m.first, "bias", nn.Parameter(torch.zeros(32))),
    "hook": lambda m: m.second.register_forward_hook(lambda module, args, output: output * 0.5),
    "checkpointing": checkpointed,
    "gradient hook": lambda m: m.second.weight.register_hook(lambda gradient: gradient * 0),
    "step hook": lambda m: m.second.weight.register_post_accumulate_grad_hook(lambda parameter: None),
    "parametrised": lambda m: register_parametrization(m.second, "weight", nn.Tanh(), unsafe=True),
    "forward": lambda m: setattr(m.second, "forward", lambda x: x),
    "lora": with_lora,
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.second.double(),
    "meta": lambda m: m.to("meta"),
    "share": lambda m: m.share_memory(),
    "copy": copy.deepcopy,
    "pickle": lambda m: torch.save(m, io.BytesIO()),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m),
}


def changed(rank, world, mesh, changes):
    """What each change says, and the first step after it; a first refusal leaves the model as it was."""
    found = {}
    for change in changes:
        model, args, _ = parallel("mlp", mesh)
        said = refusal(lambda: CHANGES[change](model))  # noqa: B023
        found[change] = said, refusal(lambda: model(*args).backward())  # noqa: B023
    return found


HARMLESS: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda m: None,
    "to cpu": lambda m: m.to("cpu"),
    "to cpu:0": lambda m: m.to("cpu:0"),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
    "part to cpu:0": lambda m: m.second.to(torch.device("cpu", 0), torch.float32),
    "in place": lambda m: _each(m, lambda p: p.mul_(0.5)),
    "data in place": lambda m: _each(m, lambda p: p.data.mul_(0.5)),
    "copied": lambda m: _each(m, lambda p: p.copy_(p * 0.5)),
    "loaded": lambda m: m.load_state_dict({n: v * 0.5 for n, v in build("mlp")[0].state_dict().items()}),
    "hook of the model": lambda m: m.register_forward_hook(lambda module, args, output: output * 2) and None,
    "eval and train": lambda m: m.eval().train(),
    "frozen": lambda m: m.second.weight.requires_grad_(False),
    "part in eval": lambda m: m.second.eval() and None,  # of which nothing depends on it
}


def _each(model: nn.Module, action: Callable[[torch.Tensor], Any]) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            action(parameter)


def harmless(rank, world, mesh):
    """How far losses of a few steps are from the plain model's after the same change."""
    found = {}
    for change, action in HARMLESS.items():
        twins = Twins("mlp", mesh, 3, torch.optim.AdamW, lr=1e-2)
        for each in (twins.model, twins.plain):
            action(each)
        found[change] = max(abs(ours - plain) for ours, plain in (twins.step() for _ in range(3)))
    return found


# -- what is done before it ------------------------------------------------------------------------------


def optimizer_before(rank, world, name, mesh, seed):
    """Largest difference of losses from the plain model's, with optimizers made before parallelize that have
    state already, and what warnings say of a list of parameters that was kept."""
    model, args, kwargs = build(name)
    plain, _, _ = build(name)
    made = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(grouped(each), lr=1e-2, eps=1e-4)
        loss_of(each(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    kept = list(model.parameters())
    parallelize(model, strategy_of(captured_model(name), mesh, seed), args, kwargs)
    with heard("still refers") as said:
        losses = [_train(m, args, kwargs, of, 3) for m, of in zip((model, plain), made, strict=True)]
    del kept
    return max(abs(a - b) for a, b in zip(*losses, strict=True)), said


# -- gradients from elsewhere -------------------------------------------------------------------------------


Made = Callable[[], torch.Tensor]
PENALTIES: dict[str, Callable[[Made, Made, Made], list[Made]]] = {
    **dict.fromkeys(("", "kept", "zeros"), lambda loss, call, penalty: [lambda: loss() + penalty()]),
    "first": lambda loss, call, penalty: [lambda: penalty() + 0.5 * loss()],
    "apart": lambda loss, call, penalty: [penalty, loss],
    "apart behind": lambda loss, call, penalty: [loss, penalty],
    "before forward": lambda loss, call, penalty: [penalty, call],
    "twice": lambda loss, call, penalty: [lambda: loss() + penalty(), lambda: 2 * call() + penalty()],
    "two calls": lambda loss, call, penalty: [lambda: loss() + call() + penalty()],
}
"""What a script goes backward from, one after the other: the loss of a call before, one of a further call, a
penalty on the parameters. Gradients are kept over two steps, or set to zeros, for two of them."""


def penalised(rank, world, mesh, seed):
    """How far losses and values are from the plain model's, with a penalty on parameters beside the loss."""
    return {how: max(_penalised(mesh, seed, how)) for how in PENALTIES}


def _penalised(mesh: Mesh, seed: int, how: str) -> tuple[float, float]:
    model, args, _ = parallel("mlp", mesh, seed)
    plain, _, _ = build("mlp")
    losses: list[list[float]] = [[], []]
    for each, own in zip((model, plain), losses, strict=True):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)

        def penalty(each: nn.Module = each) -> torch.Tensor:
            return 1e-2 * sum(p.square().sum() for p in each.parameters())  # type: ignore[return-value]

        for step in range(4):
            if how != "kept" or step % 2 == 0:
                optimizer.zero_grad(set_to_none=how != "zeros")
            loss = each(*args)
            for made in PENALTIES[how](lambda loss=loss: loss, lambda each=each: each(*args), penalty):
                made().backward()
            optimizer.step()
            own.append(float(loss.detach()))
    parameters = dict(plain.named_parameters())
    far = [
        float((whole(p.detach()).view_as(parameters[n]) - parameters[n]).abs().max())
        for n, p in model.named_parameters()
        if p.numel() and (not is_pipeline(mesh) or p.shape == parameters[n].shape)
    ]
    return max(abs(a - b) for a, b in zip(*losses, strict=True)), max(far, default=0.0)


Parameters = list[nn.Parameter]
READ: dict[str, Callable[[Parameters, list[torch.Tensor]], torch.Tensor]] = {
    "squares": lambda ps, _: sum(p.pow(2).sum() for p in ps),  # type: ignore[misc]
    "absolute": lambda ps, _: sum(p.abs().sum() for p in ps),  # type: ignore[misc]
    "norms": lambda ps, _: torch.stack([p.norm() for p in ps]).sum(),
    "means": lambda ps, _: sum(p.square().mean() for p in ps),  # type: ignore[misc]
    "norm of all": lambda ps, _: sum(p.square().sum() for p in ps).sqrt(),  # type: ignore[union-attr]
    "proximal": lambda ps, kept: sum((p - q).pow(2).sum() for p, q in zip(ps, kept, strict=True)),  # type: ignore[misc]
}
"""Penalties that scripts compute of parameters, and of copies of them."""


def requested(rank, world, mesh):
    """What is said where gradients of a plan's loss are requested of autograd."""
    model, args, kwargs = parallel("gpt2_ignored", mesh, 3)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss() -> torch.Tensor:
        value: torch.Tensor = model(*args, **kwargs).loss
        return 2 * value

    said = {
        "grad": refusal(lambda: torch.autograd.grad(loss(), parameters)),
        "unused": refusal(lambda: torch.autograd.grad(loss(), parameters[:1], allow_unused=True)),
        "inputs": refusal(lambda: loss().backward(inputs=parameters)),
        "twice": refusal(lambda: loss().backward(create_graph=True)),
        "well": refusal(lambda: loss().backward()),
    }
    x = torch.ones(3, requires_grad=True)
    (slope,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return said | {"own": str(float(torch.autograd.grad(slope.sum(), x)[0].sum()))}


def read_penalties(rank, world, mesh, seed):
    """How far what each rank reads of a step with a penalty is from the plain model's step."""
    found = {}
    for what, penalty in READ.items():
        read: list[list[float]] = []
        for plain in (False, True):
            model, args, kwargs = build("mlp") if plain else parallel("mlp", mesh, seed)
            kept = [p.detach().clone() * 0.9 for p in model.parameters()]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            own = []
            for _ in range(2):
                optimizer.zero_grad()
                apart = penalty(list(model.parameters()), kept)
                loss = model(*args, **kwargs) + 0.1 * apart
                loss.backward()
                norm = clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                own += [loss.item(), float(apart), float(f"{loss:.6f}"), float(norm)]
            with torch.no_grad():
                own += [p.norm().item() for p in model.parameters()]
            read.append(own)
        found[what] = max(abs(a - b) for a, b in zip(*read, strict=True))
    return found


def _refused_without_gradients(action: Callable[[], Any]) -> str:
    with torch.no_grad():
        return refusal(action)


def refused_penalties(rank, world, mesh):
    """What is said of penalties that a rank with parts of parameters cannot compute."""
    model, _, _ = parallel("mlp", mesh)
    weight, bias = model.first.weight, model.second.bias
    return [
        refusal(lambda: (weight @ weight.T).square().sum()),
        refusal(lambda: weight.max()),
        refusal(lambda: weight.softmax(-1)),
        refusal(lambda: weight.sum(0)),
        refusal(lambda: weight.norm(float("inf"))),
        refusal(lambda: weight * torch.ones(len(bias) + 77, 1)),
        refusal(lambda: nn.functional.mse_loss(weight, weight.detach())),
        *map(
            _refused_without_gradients,
            (
                lambda: torch.nn.utils.parameters_to_vector([weight, weight]).norm(),
                lambda: torch.nn.utils.get_total_norm([weight], foreach=True),
                lambda: weight.norm(1),
            ),
        ),
    ]


def written(rank, world, name, mesh, seed):
    """What warnings say as a state dict is written by torch.save, and whether it is read again as it was."""
    model, _, _ = parallel(name, mesh, seed)
    state, file = model.state_dict(), io.BytesIO()
    with heard("model.state_dict()") as said:
        torch.save({"model": state, "step": 3}, file)
    file.seek(0)
    read = torch.load(file, weights_only=not any(isinstance(v, DTensor) for v in state.values()))["model"]
    return said, list(read) == list(state) and read._metadata == state._metadata


def alone(rank, world, mesh, what):
    """What rank 0 is told that does something alone which takes all ranks, while the other goes on."""
    model, args, kwargs = parallel("moving_average" if what == "buffers" else "mlp", mesh, 5)
    model(*args, **kwargs)
    parameter = next(model.parameters())
    said = ""
    if rank == 0:
        with mock.patch.multiple(script_values, LOOKS_AFTER_S=0.1, SURE_AFTER_S=0.2):
            if what in ("state", "buffers"):
                said = refusal(model.state_dict)
            elif what == "norm":
                said = refusal(lambda: parameter.norm().item())
            else:
                said = refusal(lambda: parameter.detach().square().sum().item())
    else:
        model._tensoropt.together.went_on()
    # Both are where they were, or the next collective would meet another.
    dist.barrier()
    return said


# -- shapes and checkpoints ----------------------------------------------------------------------------------


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """The usual idiom: matrices decay, vectors do not."""
    named = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-3},
    ]


def groups_by_shape(rank, world, name, mesh, seed):
    """Whether the groups of parameters by number of dims, and their shapes, are those of the plain model."""
    model, _, _ = parallel(name, mesh, seed)
    plain, _, _ = build(name)
    names = [{id(p): n for n, p in each.named_parameters()} for each in (model, plain)]
    groups = [
        [[of[id(p)] for p in group["params"]] for group in grouped(each)]
        for of, each in zip(names, (model, plain), strict=True)
    ]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [groups[0] == groups[1], all(original_shape(p) == q.shape for p, q in pairs)]


def _train(model: nn.Module, args: Any, kwargs: Any, made: Any, steps: int) -> list[float]:
    optimizer, scheduler = made
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def _made(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(grouped(model), lr=1e-2, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 3) / 3)
    return optimizer, scheduler


def resumed(rank, world, name, meshes, folder, by_pytorch):
    """How far losses are from the uninterrupted run of the plain model, before and after a change of plan;
    and what was saved beside."""
    plain, args, kwargs = build(name)
    wanted = _train(plain, args, kwargs, _made(plain), 8)
    first, _, _ = parallel(name, meshes[0], 7)
    made = _made(first)
    losses = _train(first, args, kwargs, made, 4)
    second, _, _ = parallel(name, meshes[1], 2)
    made_anew = _made(second)
    if by_pytorch:
        model_state, state = states.get_state_dict(first, made[0])
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder)  # type: ignore[attr-defined]
        model_state, state = states.get_state_dict(second, made_anew[0])
        loaded = {"model": model_state, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder)  # type: ignore[attr-defined]
        states.set_state_dict(
            second, made_anew[0], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
        made_anew[1].load_state_dict(made[1].state_dict())
        extra: Any = None
    else:
        save_checkpoint(folder, first, *made, extra={"epoch": 3, "seen": torch.arange(3)})
        extra = load_checkpoint(folder, second, *made_anew)["epoch"]
    losses += _train(second, args, kwargs, made_anew, 4)
    far = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    return max(far[:4]), max(far[4:]), extra


def whole_state(rank, world, name, mesh, seed):
    """Whole state dicts from PyTorch's own functions, and back from rank 0's."""
    model, _, _ = parallel(name, mesh, seed)
    plain, _, _ = build(name)
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    # On CPUs replicated values are given as they are, not copied.
    state = {n: v.clone() for n, v in states.get_model_state_dict(model, options=options).items()}
    equal = rank > 0 or all(torch.equal(state[n], v) for n, v in plain.state_dict().items())
    _each(model, lambda p: p.zero_())
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, state if rank == 0 else {}, options=options)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [equal, all(torch.equal(whole(p.detach()), q) for p, q in pairs)]


def state_of_one_rank(rank, world, name, mesh, seed):
    """The size of a state dict that rank 0 alone asks for."""
    model, _, _ = parallel(name, mesh, seed)
    size = len(model.state_dict()) if rank == 0 else 0
    dist.barrier()
    return size


# -- as a plain module -----------------------------------------------------------------------------


def whole_model(rank, world, name, mesh, seed):
    """The plain module after a training step, beside one process; then a further step of both."""
    twins = Twins(name, mesh, seed, torch.optim.SGD, lr=0.1)
    model, plain = twins.model, twins.plain

    def far() -> float:
        ours, theirs = twins.step()
        return abs(ours - theirs)

    found: dict[str, Any] = {"first": far()}
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
            found["called"] = abs(float(twins.loss(copied)) - float(twins.loss(copy.deepcopy(plain))))
            copied.double()
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
    return found | {"second": far()}


def generated(rank, world, mesh, folder):
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
