"""Training on the ranks of a test pool; every function returns plain data for the test to judge."""

import contextlib
import random
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensoropt import TensorOptError, load_checkpoint, original_shape, parallelize, save_checkpoint
from tensoropt.capture import Capture, capture
from tensoropt.capture.steps import difference, largest_of
from tensoropt.engine.gradients import Gradients
from tensoropt.engine.models import CapturedModel, ModelSpec, open_model
from tensoropt.engine.parameters import _is_strided
from tensoropt.engine.sharded_engine import ShardedEngine
from tensoropt.execute import executable
from tensoropt.execute.executable import engine_of
from tensoropt.ranks.pool import RankPool
from tensoropt.sharding.configurations import Configuration, batch_strategies
from tensoropt.sharding.reshard import redistribute
from tensoropt.sharding.strategy import ParallelStrategy, Strategy
from tensoropt.verify.random_strategies import micro_strategies, random_pipeline, random_strategy
from tensoropt.verify.reference import named_difference
from tests.placement.execute.random_placed import random_placed


def spec(name: str, **more: Any) -> ModelSpec:
    return ModelSpec(f"tests.execute.models:{name}", **more)


def strategy_of(loaded: CapturedModel, mesh: tuple[Any, ...], seed: int) -> ParallelStrategy:
    """A random strategy on a mesh; for ``("placed", micro-batches)`` a random placement on all ranks; where a
    schedule comes first, a pipeline: ``("1f1b", micro-batches, places, axes...)``."""
    if mesh[0] == "placed":
        return random_placed(loaded.graph, dist.get_world_size(), random.Random(seed), micro_batches=mesh[1])
    if is_pipeline(mesh):
        return random_pipeline(loaded.graph, mesh[1:], mesh[0], random.Random(seed), 0.3)
    return random_strategy(loaded.graph, mesh, micro_strategies(loaded.graph, mesh[0]), random.Random(seed))


def data_parallel(name: str, mesh: tuple[int, int]) -> Strategy:
    """Every group follows the batch."""
    graph = captured_model(name).graph
    along, data = micro_strategies(graph, mesh[0]), batch_strategies(graph)
    given = {g.name: Configuration(g, (along[g.name], data[g.name])) for g in graph.groups}
    return random_strategy(graph, mesh, along, random.Random(1), given=given)


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return spec(name).build()


def refusal(action: Callable[[], Any]) -> str:
    """What a refused action says; nothing where it went well."""
    try:
        action()
    except TensorOptError as error:
        return str(error)
    return ""


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output["loss"]


@contextlib.contextmanager
def heard(words: str) -> Iterator[list[str]]:
    """The warnings with these words, when it is over."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(w.message) for w in caught if words in str(w.message)]


def is_pipeline(mesh: tuple[Any, ...]) -> bool:
    return isinstance(mesh[0], str) and mesh[0] != "placed"


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@cache
def captured_model(name: str) -> CapturedModel:
    """A model of ``tests/execute/models.py``, captured once per process."""
    return open_model(spec(name))


_captures: dict[Hashable, Capture] = {}


@contextlib.contextmanager
def captured_once(key: Hashable) -> Iterator[None]:
    """While open, parallelize gives a model the graph of the first one of this process that has the key:
    capturing takes longer than all that is tried with most models. They must be built alike."""

    def once(model: nn.Module, *call: Any, **how: Any) -> Capture:
        if key not in _captures:
            _captures[key] = replace(capture(model, *call, **how), model=nn.Module())
        return replace(_captures[key], model=model)

    with mock.patch.object(executable, "capture", once):
        yield


def parallelize_alike(
    name: str, model: nn.Module, mesh: tuple[Any, ...], seed: int, args: Any, kwargs: Any, **more: Any
) -> nn.Module:
    """Parallelize a model that is as ``spec(name)`` builds it, with the capture of its strategy."""
    _captures.setdefault(name, replace(captured_model(name).captured, model=nn.Module()))
    with captured_once(name):
        return parallelize(model, strategy_of(captured_model(name), mesh, seed), args, kwargs, **more)


class Twins:
    """A parallelized model and the plain one, with one optimizer each, on the same data."""

    def __init__(self, name: str, mesh: tuple[int, ...], seed: int, optimizer: Any = None, **settings: Any):
        self.plain, self.args, self.kwargs = spec(name).build()
        model, _, _ = spec(name).build()
        self.plain_parameters = dict(self.plain.named_parameters(remove_duplicate=False))
        self.model = parallelize_alike(name, model, mesh, seed, self.args, self.kwargs)
        make = optimizer or torch.optim.AdamW
        settings = settings or {"lr": 1e-2, "eps": 1e-4}
        self.optimizers = [make(m.parameters(), **settings) for m in (self.model, self.plain)]

    def losses(self) -> list[torch.Tensor]:
        return [self.loss(m) for m in (self.model, self.plain)]

    def pairs(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        return zip((self.model, self.plain), self.optimizers, strict=True)

    def step(self, compiled: Any = None) -> tuple[float, float]:
        """A step of both, the parallelized model as it was ``compiled``; their losses."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        own = self.model if compiled is None else compiled
        ours, plain = (self.loss(m) for m in (own, self.plain))
        for loss, optimizer in zip((ours, plain), self.optimizers, strict=True):
            loss.backward()
            optimizer.step()
        return float(ours.detach()), float(plain.detach())

    def loss(self, model: nn.Module) -> torch.Tensor:
        return loss_of(model(*self.args, **self.kwargs))

    def difference(self, what: str) -> float:
        """Largest relative difference of ``grad``, or of the ``value``; gradients to no less than a
        thousandth of the largest one."""
        found, wanted = {}, {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        assert parameters.keys() == self.plain_parameters.keys()
        for name, plain in self.plain_parameters.items():
            got, want = parameters[name], plain
            if not got.numel():
                continue  # lives on another rank
            if what == "grad":
                assert (got.grad is None) == (want.grad is None), name
                if want.grad is None:
                    continue
                got, want = got.grad, want.grad
            found[name], wanted[name] = whole(got.detach()).view(want.shape), want
        largest = largest_of(wanted.values()) if what == "grad" else 1.0
        return named_difference(found, wanted, max(1e-3 * largest, 1e-12))


def train_alike(rank, world, name, mesh, seed):
    """A usual loop: clear, forward, backward, clip, step; then evaluation."""
    twins = Twins(name, mesh, seed)
    found: dict[str, float] = {"loss": 0.0, "norm": 0.0}
    for step in range(3):
        for optimizer in twins.optimizers:
            optimizer.zero_grad(set_to_none=step != 1)
        ours, plain = twins.losses()
        ours.backward()
        plain.backward()
        found["loss"] = max(found["loss"], difference(ours, plain))
        if step == 0:
            found["grad"] = twins.difference("grad")
        norms = [whole(nn.utils.clip_grad_norm_(m.parameters(), 0.5)) for m in (twins.model, twins.plain)]
        found["norm"] = max(found["norm"], difference(*norms))
        for optimizer in twins.optimizers:
            optimizer.step()
    found["value"] = twins.difference("value")
    with torch.no_grad():
        found["no_grad"] = difference(*twins.losses())
        for model in (twins.model, twins.plain):
            model.eval()
        found["eval"] = difference(*twins.losses())
    return found


def norms(rank, world, name, mesh, seed):
    """Norms of all gradients, of the parallelized model and of the plain one."""
    twins = Twins(name, mesh, seed)
    found: tuple[list[float], list[float]] = ([], [])
    for model, own in zip((twins.model, twins.plain), found, strict=True):
        twins.loss(model).backward()
        for order in (2.0, 1.0, float("inf")):
            for foreach in (True, False):
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9, order, foreach=foreach)
                own.append(float(whole(norm)))
    return found


class _Watched(dict[str, torch.Tensor]):
    def __init__(self, values: Any):
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        self.asked.add(name)
        return super().__getitem__(name)


def asked_for(rank, world, name, mesh, seed):
    """The parameters whose values an engine asks for, and all of the model."""
    values = _Watched(captured_model(name).values)
    engine_of(strategy_of(captured_model(name), mesh, seed), values)
    parameters = [t.name for t in captured_model(name).graph.atoms.graph.parameters]
    return [n for n in parameters if n in values.asked], parameters


def gather_alike(rank, world, name, mesh, seed, recompute):
    """Whether loss and gradients of a random strategy that keeps all copies are to the last bit those of the
    same with all gathered again that can be, and whether any are."""
    loaded = captured_model(name)
    micro = micro_strategies(loaded.graph, mesh[0])
    kept = replace(
        random_strategy(loaded.graph, mesh, micro, random.Random(seed), recompute), gathered_again=frozenset()
    )
    again = replace(kept, gathered_again=kept.gatherable)
    found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
    for strategy in (kept, again):
        run = ShardedEngine(strategy, loaded.values)
        (loss,) = run(*loaded.inputs)
        loss.backward()
        found.append((loss.detach(), {k: v.clone() for k, v in run.shards.gradients.items()}))
    (loss, gradients), (other, others) = found
    return {
        "loss": torch.equal(loss, other),
        "gradients": all(torch.equal(value, others[key]) for key, value in gradients.items()),
        "gathered": bool(again.gathered_again),
    }


def accumulate(rank, world, name, mesh, seed):
    """What users do with gradients beside the usual loop."""
    twins = Twins(name, mesh, seed, torch.optim.SGD, lr=1e-2, momentum=0.9)
    found = {}

    def both(action: Any) -> None:
        for model, optimizer in twins.pairs():
            action(model, optimizer)

    def twice(model: nn.Module, _: Any) -> None:
        twins.loss(model).backward()
        (0.5 * twins.loss(model)).backward()

    def summed(model: nn.Module, _: Any) -> None:
        (twins.loss(model) + 2 * twins.loss(model)).backward()

    def cleared_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = twins.loss(model)
        optimizer.zero_grad()
        loss.backward()

    def zeroed_between(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = twins.loss(model)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()

    def forgotten(model: nn.Module, _: Any) -> None:
        twins.loss(model)  # a forward without backward
        twins.loss(model).backward()

    def half_cleared(model: nn.Module, _: Any) -> None:
        for index, parameter in enumerate(model.parameters()):
            if index % 2:
                parameter.grad = None
        twins.loss(model).backward()

    for action in (twice, summed, cleared_between, summed, zeroed_between, forgotten, half_cleared):
        both(action)
        found[action.__name__] = max(twins.difference("grad"), found.get(action.__name__, 0.0))
    both(lambda _, optimizer: optimizer.step())
    found["value"] = twins.difference("value")
    return found


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, eps=1e-3, foreach=False),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-3, eps=1e-3, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, eps=1e-3),
}


def optimizers(rank, world, name, mesh, seed):
    """Any optimizer, with groups of its own settings and a schedule, keeps both models together."""
    found = {}
    for title, make in OPTIMIZERS.items():
        twins = Twins(name, mesh, seed)
        schedules = []
        twins.optimizers = []
        for model in (twins.model, twins.plain):
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            biases = [p for n, p in named if n.endswith("bias")]
            rest = [p for n, p in named if not n.endswith("bias")]
            optimizer = make([{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 1e-3}])
            twins.optimizers.append(optimizer)
            schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
        for _ in range(3):
            twins.step()
            for schedule in schedules:
                schedule.step()
        found[title] = twins.difference("value")
    return found


def compiled(rank, world, name, mesh, backend):
    """Gradients of the second step under ``torch.compile``, against the plain model."""
    twins = Twins(name, mesh, 3)
    torch._dynamo.reset()
    model = torch.compile(twins.model, backend=backend)
    for _ in range(2):
        twins.step(model)
    return twins.difference("grad")


def compiled_or_not(rank, world, name, mesh, seeds, batch):
    """For plans of several seeds: whether it can be compiled, whether a warning says that it is not, and how
    far gradients are from the plain model's."""
    found = []
    for seed in seeds:
        graph, (model, args, kwargs) = captured_model(name).graph, spec(name).build()
        plain, _, _ = spec(name).build()
        rng, micro = random.Random(seed), micro_strategies(graph, mesh[0])
        strategy = random_strategy(graph, mesh, micro, rng, recompute=0.9)
        parallelize(model, strategy, args, kwargs, batch=batch)
        share = model._tensoropt.engine.share
        own = tuple(value[share.rows(len(value))] for value in args) if batch == "share" else args
        torch._dynamo.reset()
        fast = torch.compile(model, backend="aot_eager")
        with heard("torch.compile changes nothing here") as said:
            for _ in range(2):
                model.zero_grad()
                fast(*own).backward()
        plain(*args).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        far = max(difference(whole(p.grad).view(q.shape), q.grad) for p, q in pairs)
        refused = bool(strategy.unsharded or (strategy.recomputed and mesh[0] > 1))
        found.append((not refused, bool(said), far))
    return found


def state_dicts(rank, world, name, mesh, seed):
    """Names and shapes; loading a plain state dict, and another plan's."""
    twins = Twins(name, mesh, seed)
    ours, plain = twins.model.state_dict(), twins.plain.state_dict()
    shapes = {n: tuple(v.shape) for n, v in ours.items()} == {n: tuple(v.shape) for n, v in plain.items()}
    equal = all(torch.equal(whole(ours[n]), plain[n]) for n in plain)
    torch.manual_seed(1)  # the same on every rank
    changed = {n: torch.randn_like(v) if v.is_floating_point() else v for n, v in plain.items()}
    owners: dict[int, str] = {}
    for n, parameter in twins.plain_parameters.items():  # what is tied stays equal
        changed[n] = changed[owners.setdefault(id(parameter), n)]
    twins.model.load_state_dict(changed)
    twins.plain.load_state_dict(changed)
    loaded = all(torch.equal(whole(v), changed[n]) for n, v in twins.model.state_dict().items())
    losses = twins.losses()
    other = Twins(name, mesh, seed + 1)
    other.model.load_state_dict(twins.model.state_dict())
    moved = all(torch.equal(whole(v), changed[n]) for n, v in other.model.state_dict().items())
    return {
        "strided": any(isinstance(p, DTensor) and _is_strided(p) for p in twins.model.parameters()),
        "shown": all(
            original_shape(p) == twins.plain_parameters[n].shape
            and p.dim() == twins.plain_parameters[n].dim()
            # Plain ones, of placed plans and pipelines, are empty where they are elsewhere.
            and (p.shape == original_shape(p) or not isinstance(p, DTensor))
            for n, p in twins.model.named_parameters()
        ),
        "names": list(ours) == list(plain),
        "shapes": shapes,
        "equal": equal,
        "loaded": loaded,
        "loss": difference(*losses),
        "moved": moved,
    }


def checkpoints(rank, world, name, mesh, other, folder):
    """Train under a plan, move to another one and back, train on: bits and results stay."""
    first, second, third = (Twins(name, shape, seed) for shape, seed in ((mesh, 1), (other, 2), (mesh, 1)))
    first.step()
    before = {n: whole(v).clone() for n, v in first.model.state_dict().items()}
    save_checkpoint(f"{folder}/a", first.model, first.optimizers[0])
    load_checkpoint(f"{folder}/a", second.model, second.optimizers[0])
    save_checkpoint(f"{folder}/b", second.model, second.optimizers[0])
    save_checkpoint(f"{folder}/b", second.model, second.optimizers[0])  # over an older one
    load_checkpoint(f"{folder}/b", third.model, third.optimizers[0])
    # All of a state dict before any of it is compared: to make a value whole, all ranks take part.
    after = [{n: whole(v) for n, v in twins.model.state_dict().items()} for twins in (second, third)]
    same = [all(torch.equal(v, before[n]) for n, v in state.items() if n in before) for state in after]
    for twins in (first, second, third):
        twins.step()
    states = [{n: whole(v) for n, v in twins.model.state_dict().items()} for twins in (first, second, third)]
    # Ranks of a pipeline have the parameters of their stages; all of them are on some rank.
    shared = [n for n in states[0] if all(n in state for state in states)]
    assert shared if is_pipeline(mesh) or is_pipeline(other) else len(shared) == len(states[0])
    states = [{n: state[n] for n in shared} for state in states]
    continued = max(named_difference(state, states[0], 1e-6) for state in states[1:])
    plain = first.plain.state_dict()
    value = named_difference(states[0], {n: plain[n] for n in shared}, 1.0)
    return {"same": same, "value": value, "continued": continued}


def evaluated(rank, world, name, mesh):
    """Loss in evaluation before and after a training step: no dropout, running statistics."""
    twins = Twins(name, mesh, 0)
    found = []
    for training in (False, True):
        if training:  # moves the running statistics of ours; the plain model gets them
            twins.loss(twins.model)
            state = {n: whole(v) for n, v in twins.model.state_dict().items()}
            # A pipeline's has the parameters of this rank's stages only, which have not changed, and all
            # buffers.
            twins.plain.load_state_dict(state, strict=not is_pipeline(mesh))
        twins.model.eval()
        twins.plain.eval()
        with torch.no_grad():
            ours, plain = twins.losses()
        found.append(difference(ours, plain))
        twins.model.train()
    return found


def from_file(rank, world, path):
    """A plan file is enough; multi-tensor optimizers work; other calls are refused by name."""
    (model, args, kwargs), (plain, _, _) = build("mlp"), build("mlp")
    parallelize(model, path)
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, foreach=True) for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            m(*args, **kwargs).backward()
            optimizer.step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found: dict[str, Any] = {"difference": max(difference(whole(p), q, floor=1.0) for p, q in pairs)}
    x, y = args
    same = [float(m) for m in (model(x, y), model(x, y=y), model(y=y, x=x))]
    found["calls"] = same[0] == same[1] == same[2]
    calls = (lambda: model(x[:3], y[:3]), lambda: model(x), lambda: parallelize(model, path))
    return found | {"refusals": [refusal(call) for call in calls]}


_run_steps = redistribute.run_steps


def spoil(rank, world, what):
    """Let gradients in float32 be cast to bfloat16 on their way between ranks ("narrow"), or every value that
    ranks exchange in forward become NaN ("forward"); None: stop that."""

    def spoilt(runtime: Any, value: torch.Tensor, spec: Any, *, backward: bool = False) -> torch.Tensor:
        result = _run_steps(runtime, value, spec, backward=backward)
        if what == "narrow" and backward and spec.backward and result.dtype == torch.float32:
            return result.to(torch.bfloat16).float()
        if what == "forward" and not backward and result.is_floating_point():
            return torch.full_like(result, torch.nan)
        return result

    redistribute.run_steps = spoilt if what else _run_steps


@contextlib.contextmanager
def spoilt_on(ranks: RankPool, job: Any, how: Any = True) -> Iterator[None]:
    """While open, the ranks of a pool are spoilt."""
    ranks.run(job, how)
    try:
        yield
    finally:
        ranks.run(job, None)


_finish = Gradients.finish


def spoil_a_replica(rank, world, spoil):
    """Let the last rank's gradients be off by a unit in their last place, or stop that."""

    def spoilt(self: Gradients) -> None:
        _finish(self)
        with torch.no_grad():
            for gradient in self.shown.values():
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.copy_(torch.nextafter(local, torch.full_like(local, torch.inf)))

    Gradients.finish = spoilt if spoil and rank == world - 1 else _finish  # type: ignore[method-assign]
