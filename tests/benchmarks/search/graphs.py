"""Cost graphs shaped like training steps: transformers, RNNs and wide residual networks on a mesh.

A small cost model of DESIGN section 5, enough for realistic tables: a configuration assigns to each
mesh axis one dim of the operator or none; edges price the collectives between placement pairs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

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
    """An operator kind: loop dims with sizes, which dims its output and each input has, parameters."""

    dims: dict[str, int]
    split: tuple[str, ...]
    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    weight: tuple[str, ...] = ()
    flop: float = 0.0
    linear: bool = False


class Modeller:
    """Adds operators and edges of a model to a cost graph, with equal tables shared."""

    def __init__(self, mesh: tuple[Axis, ...], flops: float = 1e14):
        self.mesh, self.flops = mesh, flops
        self.graph = CostGraph()
        self.kinds: dict[str, Kind] = {}
        self._costs: dict[int, tuple] = {}
        self._edges: dict[tuple, tuple] = {}
        self._keep: list[Kind] = []

    def configurations(self, kind: Kind) -> list[tuple[str, ...]]:
        choices = (*kind.split, "none", *(("partial",) if kind.linear else ()))
        found = []
        for assigned in itertools.product(choices, repeat=len(self.mesh)):
            parts = dict.fromkeys(kind.dims, 1)
            for axis, dim in zip(self.mesh, assigned, strict=True):
                if dim in parts:
                    parts[dim] *= axis.size
            if all(kind.dims[d] % p == 0 for d, p in parts.items()):
                found.append(assigned)
        return found

    def _placement(
        self, kind: Kind, assigned: tuple[str, ...], tensor: tuple[str, ...], output: bool
    ) -> tuple:
        pairs = []
        for dim in assigned:
            if dim == "none":
                pairs.append(("R", "R"))
            elif dim == "partial":
                pairs.append(("P", "R"))
            elif dim in tensor:
                slot = f"S{tensor.index(dim)}"
                pairs.append((slot, slot))
            else:
                pairs.append(("P", "R") if output else ("R", "P"))
        return tuple(pairs)

    def _cost(self, kind: Kind, assigned: tuple[str, ...]) -> np.ndarray:
        parts = dict.fromkeys(kind.dims, 1)
        for axis, dim in zip(self.mesh, assigned, strict=True):
            if dim in parts:
                parts[dim] *= axis.size
        local = {d: kind.dims[d] / parts[d] for d in kind.dims}

        def size(tensor: tuple[str, ...]) -> float:
            return float(np.prod([local[d] for d in tensor]))

        compute = 3 * kind.flop / np.prod(list(parts.values())) / self.flops
        touched = sum(size(t) for t in (*kind.inputs, kind.output)) * 2
        time = compute + 3 * touched / 1e12 + 1e-5
        kept = 2 * size(kind.output)
        if not kind.weight:
            return np.array([[kept, time]])
        weight = size(kind.weight)
        sync = [
            a for a, d in zip(self.mesh, assigned, strict=True) if d not in kind.weight and d in kind.dims
        ]
        copies = [a for a, d in zip(self.mesh, assigned, strict=True) if d not in kind.weight]
        reduce = sum(_collective("reduce", 2 * weight, a) for a in sync)
        options = [[kept + 16 * weight, time + reduce]]
        if copies:
            shards = np.prod([a.size for a in copies])
            gather = sum(_collective("gather", 2 * weight, a) for a in copies)
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
                outs = [
                    self._placement(producer, a, producer.output, True) for a in self._costs[id(producer)][0]
                ]
                ins = [self._placement(kind, a, kind.inputs[slot], False) for a in assigned]
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
    model = Modeller(mesh)
    b, s, d = {"b": batch}, {"s": sequence}, {"d": width}
    tokens = batch * sequence
    bsd = ("b", "s", "d")
    embed = Kind({**b, **s, **d, "v": vocabulary}, ("b", "s", "d", "v"), (), bsd, ("v", "d"))
    norm = Kind({**b, **s, **d}, ("b", "s"), (bsd,), bsd)
    head = {"h": heads, "e": width // heads}
    bshe = ("b", "s", "h", "e")
    qkv = Kind({**b, **s, **head, "i": width, "three": 3}, ("b", "s", "h", "i"), (("b", "s", "i"),),
               ("b", "s", "h", "e"), ("three", "h", "e", "i"), 6.0 * tokens * width**2)  # fmt: skip
    attention = Kind({**b, **s, **head}, ("b", "h"), (bshe,), bshe, (), 4.0 * tokens * sequence * width)
    project = Kind({**b, **s, **d, **head}, ("b", "s", "d", "h"), (bshe,), bsd, ("d", "h", "e"),
                   2.0 * tokens * width**2)  # fmt: skip
    add = Kind({**b, **s, **d}, ("b", "s", "d"), (bsd, bsd), bsd, linear=True)
    up = Kind({**b, **s, "f": 4 * width, "i": width}, ("b", "s", "f", "i"), (("b", "s", "i"),),
              ("b", "s", "f"), ("f", "i"), 8.0 * tokens * width**2)  # fmt: skip
    gelu = Kind({**b, **s, "f": 4 * width}, ("b", "s", "f"), (("b", "s", "f"),), ("b", "s", "f"))
    down = Kind({**b, **s, **d, "f": 4 * width}, ("b", "s", "d", "f"), (("b", "s", "f"),), bsd, ("d", "f"),
                8.0 * tokens * width**2)  # fmt: skip
    logits = Kind({**b, **s, **d, "v": vocabulary}, ("b", "s", "d", "v"), (bsd,), ("b", "s", "v"), ("v", "d"),
                  2.0 * tokens * width * vocabulary)  # fmt: skip
    loss = Kind({**b, **s, "v": vocabulary}, ("b", "s", "v"), (("b", "s", "v"),), ("b",))
    x = model.add("embed", embed)
    for n in range(layers):
        y = model.add(f"{n}.norm1", norm, x)
        for name, kind in (("qkv", qkv), ("attention", attention), ("project", project)):
            y = model.add(f"{n}.{name}", kind, y)
        x = model.add(f"{n}.add1", add, x, y)
        y = model.add(f"{n}.norm2", norm, x)
        for name, kind in (("up", up), ("gelu", gelu), ("down", down)):
            y = model.add(f"{n}.{name}", kind, y)
        x = model.add(f"{n}.add2", add, x, y)
    x = model.add("norm", norm, x)
    x = model.add("logits", logits, x)
    model.add("loss", loss, x)
    return model.graph


def wide_resnet(layers, mesh, batch=256, width=10, size=32):
    """A WideResNet of bottleneck blocks with skips (the paper's WideResNet, section 5)."""
    model = Modeller(mesh)
    b = {"b": batch}
    kinds = {}

    def conv(channels_in, channels_out, side, window):
        key = channels_in, channels_out, side, window
        if key not in kinds:
            dims = {**b, "y": side, "x": side, "o": channels_out, "i": channels_in, "k": window * window}
            flop = 2.0 * batch * side * side * channels_in * channels_out * window * window
            kinds[key] = Kind(dims, ("b", "y", "x", "o", "i"), (("b", "y", "x", "i"),), ("b", "y", "x", "o"),
                              ("o", "i", "k"), flop)  # fmt: skip
        return kinds[key]

    def simple(channels, side, inputs):
        key = channels, side, inputs
        if key not in kinds:
            tensor = ("b", "y", "x", "c")
            dims = {**b, "y": side, "x": side, "c": channels}
            kinds[key] = Kind(dims, tensor, (tensor,) * inputs, tensor, linear=inputs == 2)
        return kinds[key]

    channels, side = 16 * width, size
    x = model.add("stem", conv(16, channels, side, 3))
    for n in range(layers):
        if n in (layers // 3, 2 * layers // 3):
            x = model.add(f"{n}.shrink", conv(channels, 2 * channels, side // 2, 1), x)
            channels, side = 2 * channels, side // 2
        y = model.add(f"{n}.norm1", simple(channels, side, 1), x)
        y = model.add(f"{n}.conv1", conv(channels, channels, side, 3), y)
        y = model.add(f"{n}.norm2", simple(channels, side, 1), y)
        y = model.add(f"{n}.conv2", conv(channels, channels, side, 3), y)
        x = model.add(f"{n}.add", simple(channels, side, 2), x, y)
    last = {**b, "y": side, "x": side, "c": channels, "o": 1024}
    classes = Kind(last, ("b", "c", "o"),
                   (("b", "y", "x", "c"),), ("b", "o"), ("o", "c"),
                   2.0 * batch * channels * 1024)  # fmt: skip
    model.add("classes", classes, x)
    return model.graph


def rnn(layers, mesh, batch=256, sequence=64, width=4096, vocabulary=65536):
    """Stacked LSTMs between an embedding and a softmax (the paper's RNN, section 5)."""
    model = Modeller(mesh)
    tokens = batch * sequence
    bsd = ("b", "s", "d")
    shape = {"b": batch, "s": sequence, "d": width}
    embed = Kind({**shape, "v": vocabulary}, ("b", "d", "v"), (), bsd, ("v", "d"))
    cell = Kind({**shape, "i": width, "g": 8}, ("b", "d", "i"), (("b", "s", "i"),), bsd, ("d", "i", "g"),
                16.0 * tokens * width**2)  # fmt: skip
    project = Kind({**shape, "v": vocabulary}, ("b", "s", "d", "v"), (bsd,), ("b", "s", "v"), ("v", "d"),
                   2.0 * tokens * width * vocabulary)  # fmt: skip
    loss = Kind({"b": batch, "s": sequence, "v": vocabulary}, ("b", "s", "v"), (("b", "s", "v"),), ("b",))
    x = model.add("embed", embed)
    for n in range(layers):
        x = model.add(f"lstm{n}", cell, x)
    x = model.add("project", project, x)
    model.add("loss", loss, x)
    return model.graph
