"""Cost graphs shaped like training steps: transformers, RNNs and wide residual networks on a mesh.

A small cost model of DESIGN section 5, enough for realistic tables: a configuration assigns to each
mesh axis one dim of the operator or none; edges price the collectives between placement pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from tensoropt.search import CostGraph

INF = float("inf")


@dataclass(frozen=True)
class Axis:
    """One mesh axis: devices, link bandwidth in bytes/s, latency in s."""

    size: int
    bandwidth: float = 1e11
    latency: float = 1e-5


def _collective(kind: str, nbytes: float, axis: Axis) -> float:
    share = (axis.size - 1) / axis.size
    factor = {"gather": 1.0, "scatter": 1.0, "reduce": 2.0, "all_to_all": 1.0 / axis.size}[kind]
    return axis.latency + factor * share * nbytes / axis.bandwidth


def _convert(source: str, target: str, nbytes: float, axis: Axis) -> float:
    """Time to turn one placement into another on one axis; ``nbytes`` of the tensor unsplit there."""
    if source == target or source == "R":
        return 0.0
    if source == "P":
        return _collective("reduce" if target == "R" else "scatter", nbytes, axis)
    if target == "P":
        return INF
    return _collective("gather" if target == "R" else "all_to_all", nbytes, axis)


def _edge(source: tuple, target: tuple, nbytes: float, mesh: tuple[Axis, ...]) -> tuple[float, float]:
    """(memory, time) of resharding; a placement is one (forward, gradient) pair per axis."""
    time = 0.0
    local = nbytes
    for axis, (forward, gradient), (want, given) in zip(mesh, source, target, strict=True):
        time += _convert(forward, want, local, axis) + _convert(given, gradient, local, axis)
        if forward[0] == "S" and want[0] == "S":
            local /= axis.size
    return (0.0, time) if time < INF else (INF, INF)


@dataclass(frozen=True)
class Kind:
    """An operator kind: loop dims with sizes, which dims may be split, and which its output, each input and
    its parameters have; a letter each."""

    dims: dict[str, int]
    split: str
    inputs: tuple[str, ...]
    output: str
    weight: str
    flop: float
    linear: bool


def kind_of(
    sizes: dict[str, int],
    signature: str,
    split: str,
    weight: str = "",
    flop: float = 0.0,
    linear: bool = False,
) -> Kind:
    """A kind by its inputs and its output, as in ``bsi->bshe``."""
    inputs, output = signature.split("->")
    dims = {d: n for d, n in sizes.items() if d in f"{signature}{split}{weight}"}
    return Kind(dims, split, tuple(filter(None, inputs.split(","))), output, weight, flop, linear)


class Modeller:
    """Adds operators and edges of a model to a cost graph, with equal tables shared."""

    def __init__(self, mesh: tuple[Axis, ...], flops: float = 1e14):
        self.mesh, self.flops = mesh, flops
        self.graph = CostGraph()
        self.kinds: dict[str, Kind] = {}
        self._costs: dict[int, tuple] = {}
        self._edges: dict[tuple, tuple] = {}
        self._keep: list[Kind] = []

    def _parts(self, kind: Kind, assigned: tuple[str, ...]) -> dict[str, int]:
        """In how many parts each dim is."""
        parts = dict.fromkeys(kind.dims, 1)
        for axis, dim in zip(self.mesh, assigned, strict=True):
            if dim in parts:
                parts[dim] *= axis.size
        return parts

    def configurations(self, kind: Kind) -> list[tuple[str, ...]]:
        choices = (*kind.split, "none", *(("partial",) if kind.linear else ()))
        return [
            assigned
            for assigned in itertools.product(choices, repeat=len(self.mesh))
            if all(kind.dims[d] % p == 0 for d, p in self._parts(kind, assigned).items())
        ]

    def _placement(self, assigned: tuple[str, ...], tensor: str, output: bool) -> tuple:
        pairs = []
        for dim in assigned:
            if dim == "none":
                pairs.append(("R", "R"))
            elif dim in tensor:
                slot = f"S{tensor.index(dim)}"
                pairs.append((slot, slot))
            else:
                pairs.append(("P", "R") if output or dim == "partial" else ("R", "P"))
        return tuple(pairs)

    def _cost(self, kind: Kind, assigned: tuple[str, ...]) -> np.ndarray:
        parts = self._parts(kind, assigned)
        local = {d: kind.dims[d] / parts[d] for d in kind.dims}

        def size(tensor: str) -> float:
            return float(np.prod([local[d] for d in tensor]))

        compute = 3 * kind.flop / np.prod(list(parts.values())) / self.flops
        touched = sum(size(t) for t in (*kind.inputs, kind.output)) * 2
        time = compute + 3 * touched / 1e12 + 1e-5
        kept = 2 * size(kind.output)
        if not kind.weight:
            return np.array([[kept, time]])
        weight = size(kind.weight)
        copies = [(a, d) for a, d in zip(self.mesh, assigned, strict=True) if d not in kind.weight]
        reduce = sum(_collective("reduce", 2 * weight, a) for a, d in copies if d in kind.dims)
        options = [[kept + 16 * weight, time + reduce]]
        if copies:
            shards = np.prod([a.size for a, _ in copies])
            gather = sum(_collective("gather", 2 * weight, a) for a, _ in copies)
            options.append([kept + 2 * weight + 14 * weight / shards, time + reduce])
            options.append([kept + 16 * weight / shards, time + reduce + gather])
        return np.array(options)

    def add(self, name: str, kind: Kind, *inputs: str) -> str:
        if id(kind) not in self._costs:
            assigned = self.configurations(kind)
            self._costs[id(kind)] = assigned, [self._cost(kind, a) for a in assigned]
            self._keep.append(kind)
        assigned, costs = self._costs[id(kind)]
        self.graph.add_operator(name, costs)
        self.kinds[name] = kind
        for slot, source in enumerate(inputs):
            producer = self.kinds[source]
            key = id(producer), id(kind), slot
            if key not in self._edges:
                outs = [self._placement(a, producer.output, True) for a in self._costs[id(producer)][0]]
                ins = [self._placement(a, kind.inputs[slot], False) for a in assigned]
                out_set, in_set = sorted(set(outs)), sorted(set(ins))
                nbytes = 2 * float(np.prod([producer.dims[d] for d in producer.output]))
                table = np.array([[_edge(o, i, nbytes, self.mesh) for i in in_set] for o in out_set])
                rows = np.array([out_set.index(o) for o in outs])
                cols = np.array([in_set.index(i) for i in ins])
                self._edges[key] = table, rows, cols
            table, rows, cols = self._edges[key]
            self.graph.add_edge(source, name, table, rows=rows, cols=cols)
        return name


def transformer(layers, mesh, batch=32, sequence=1024, width=1024, heads=16, vocabulary=50304):
    """A GPT: about ten operators a layer, residual edges, loss at the end."""
    model, square = Modeller(mesh), 2.0 * batch * sequence * width**2
    sizes = {"b": batch, "s": sequence, "d": width, "v": vocabulary, "h": heads, "e": width // heads}
    of = partial(kind_of, sizes | {"i": width, "t": 3, "f": 4 * width})
    kinds = {
        "embed": of("->bsd", "bsdv", "vd"),
        "norm": of("bsd->bsd", "bs"),
        "qkv": of("bsi->bshe", "bshi", "thei", 3 * square),
        "attention": of("bshe->bshe", "bh", "", 4.0 * batch * sequence**2 * width),
        "project": of("bshe->bsd", "bsdh", "dhe", square),
        "add": of("bsd,bsd->bsd", "bsd", linear=True),
        "up": of("bsi->bsf", "bsfi", "fi", 4 * square),
        "gelu": of("bsf->bsf", "bsf"),
        "down": of("bsf->bsd", "bsdf", "df", 4 * square),
        "logits": of("bsd->bsv", "bsdv", "vd", 2.0 * batch * sequence * width * vocabulary),
        "loss": of("bsv->b", "bsv"),
    }
    x = model.add("embed", kinds["embed"])
    for n in range(layers):
        for half, names in enumerate((("qkv", "attention", "project"), ("up", "gelu", "down")), start=1):
            y = model.add(f"{n}.norm{half}", kinds["norm"], x)
            for name in names:
                y = model.add(f"{n}.{name}", kinds[name], y)
            x = model.add(f"{n}.add{half}", kinds["add"], x, y)
    for name in ("norm", "logits", "loss"):
        x = model.add(name, kinds[name], x)
    return model.graph


def wide_resnet(layers, mesh, batch=256, width=10, size=32):
    """A WideResNet of bottleneck blocks with skips (the paper's WideResNet, section 5)."""
    model = Modeller(mesh)

    @cache
    def conv(channels_in: int, channels_out: int, side: int, window: int) -> Kind:
        sizes = {"b": batch, "y": side, "x": side, "o": channels_out, "i": channels_in, "k": window**2}
        flop = 2.0 * batch * side * side * channels_in * channels_out * window**2
        return kind_of(sizes, "byxi->byxo", "byxoi", "oik", flop)

    @cache
    def simple(channels: int, side: int, inputs: int) -> Kind:
        sizes = {"b": batch, "y": side, "x": side, "c": channels}
        return kind_of(sizes, f"{','.join(['byxc'] * inputs)}->byxc", "byxc", linear=inputs == 2)

    channels, side = 16 * width, size
    x = model.add("stem", conv(16, channels, side, 3))
    for n in range(layers):
        if n in (layers // 3, 2 * layers // 3):
            x = model.add(f"{n}.shrink", conv(channels, 2 * channels, side // 2, 1), x)
            channels, side = 2 * channels, side // 2
        y = x
        for half in (1, 2):
            y = model.add(f"{n}.norm{half}", simple(channels, side, 1), y)
            y = model.add(f"{n}.conv{half}", conv(channels, channels, side, 3), y)
        x = model.add(f"{n}.add", simple(channels, side, 2), x, y)
    last = {"b": batch, "y": side, "x": side, "c": channels, "o": 1024}
    model.add("classes", kind_of(last, "byxc->bo", "bco", "oc", 2.0 * batch * channels * 1024), x)
    return model.graph


def rnn(layers, mesh, batch=256, sequence=64, width=4096, vocabulary=65536):
    """Stacked LSTMs between an embedding and a softmax (the paper's RNN, section 5)."""
    model, tokens = Modeller(mesh), batch * sequence
    of = partial(kind_of, {"b": batch, "s": sequence, "d": width, "v": vocabulary, "i": width, "g": 8})
    cell = of("bsi->bsd", "bdi", "dig", 16.0 * tokens * width**2)
    x = model.add("embed", of("->bsd", "bdv", "vd"))
    for n in range(layers):
        x = model.add(f"lstm{n}", cell, x)
    x = model.add("project", of("bsd->bsv", "bsdv", "vd", 2.0 * tokens * width * vocabulary), x)
    model.add("loss", of("bsv->b", "bsv"), x)
    return model.graph
