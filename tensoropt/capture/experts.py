"""Replacement of each layer of experts, which models write as a dozen operators, with one operator.

The operators are those of ``transformers`` (``grouped_mm_experts_forward`` in ``integrations/moe.py``).
Expert numbers are sorted; tokens are gathered in that order, multiplied with one matrix per expert, scaled by
the router's weights, put back in order, and summed per token. No other form is replaced. The one operator can
be split over ranks where the dozen cannot (:mod:`tensoropt.ops.families.routed_experts`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tensoropt.capture.numbering import reading
from tensoropt.graph import Operator, OperatorGraph, Ref, map_refs
from tensoropt.ops.families.experts import COUNTS, GROUPED_PRODUCTS
from tensoropt.ops.families.routed_experts import (
    ENDS,
    EXPERT_OF_ROW,
    EXPERTS,
    INDEX,
    ROWS,
    TRANSPOSE,
    BodyCall,
    plain,
    weight_name,
)
from tensoropt.ops.registry import index_space

_SORTS = ("aten.sort.default", "aten.sort.stable")
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


class _Unlike(Exception):  # noqa: N818 - a signal, not an error
    """Raised if the operators after a sort do not have the form that this module replaces."""


def with_experts(graph: OperatorGraph) -> OperatorGraph:
    """Return the graph with each recognised layer of experts as one operator."""
    found = 0
    for name in [op.name for op in graph.operators if op.target in _SORTS]:
        try:
            graph = _Layer(graph, graph.by_name[name]).replaced(found)
            found += 1
        except _Unlike:
            pass
    left = sum(op.target in GROUPED_PRODUCTS for op in graph.operators)
    if not left:
        return graph
    note = (
        f"{left} grouped products of experts are not in the form that transformers writes, so no plan can "
        "send tokens to the ranks that hold their experts"
    )
    return replace(graph, notes=(*graph.notes, note))


class _Layer:
    """A layer of experts, recognised by reading its operators in order from the sort of expert numbers.

    Attributes:
        role: content of each tensor that depends on the sorted order, by name: sorted expert numbers
            (``ids``), their permutation (``order``) and its ``inverse``, each row's ``token``, rows per
            expert (``counts``) and their cumulative sums (``ends``), ``rows``, router weights (``factors``),
            ``scaled`` rows, rows put ``back`` in order, also as ``[tokens, chosen, width]`` (``by token``).
        body: calls that compute the experts on sorted rows (one row per token and chosen expert).
        named: name that each tensor of the graph has inside the body.
        weights: names of the weights and biases that the body reads, in order.
        gone: names of the operators that the new operator replaces.
    """

    def __init__(self, graph: OperatorGraph, sort: Operator):
        self.graph, self.sort = graph, sort
        self.role = {sort.outputs[0]: "ids", sort.outputs[1]: "order"}
        self.named = {sort.outputs[0]: EXPERT_OF_ROW}
        self.weights: list[str] = []
        self.body: list[BodyCall] = []
        self.gone = {sort.name}
        self.x = self.scale = self.result = ""
        self.experts = 0
        self.module = self.source = ""
        if not isinstance(sort.args[0], Ref) or len(graph.tensors[sort.args[0].name].shape) != 1:
            raise _Unlike
        self.choice = self._flattened(sort.args[0].name, sort)
        shape = graph.tensors[self.choice].shape
        if len(shape) != 2 or shape[0] < 2:
            raise _Unlike
        self.tokens, self.chosen = shape

    def _flattened(self, name: str, reader: Operator) -> str:
        """Return the tensor ``[tokens, experts per token]`` of which ``name`` is a flattened view. The new
        operator replaces this view, too, if ``reader`` is its only reader."""
        view = self.graph.producer.get(name)
        if view is None or view.target not in _VIEWS:
            raise _Unlike
        if {op.name for op in self.graph.consumers[name]} == {reader.name}:
            self.gone.add(view.name)
        source: str = view.args[0].name
        return source

    # -- reading ----------------------------------------------------------------------------------

    def replaced(self, number: int) -> OperatorGraph:
        """Return the graph with this layer as one operator, called ``experts`` or ``experts_{number}``.

        Raises:
            _Unlike: the layer is not of the form of ``transformers``.
        """
        begun = False
        for op in self.graph.operators:
            begun = begun or op is self.sort
            if begun and op is not self.sort and not self.role.keys().isdisjoint(op.inputs()):
                self._read(op)
                self.gone.add(op.name)
        seen = {*self.graph.outputs, *self.graph.mutations.values()}
        if not (self.x and self.scale and self.result and self.body) or not self.role.keys().isdisjoint(seen):
            raise _Unlike
        return self._written(number)

    def _read(self, op: Operator) -> None:
        if self.result:
            raise _Unlike  # something else needs rows in their order
        args, first = op.args, op.args[0] if op.args else None
        kind = self.role.get(first.name) if isinstance(first, Ref) else None
        out = op.outputs[0]
        tensors = self.graph.tensors
        if op.target == INDEX:
            self._looked_up(op, kind)
        elif kind == "order" and op.target == "aten.floor_divide.default" and args[1] == self.chosen:
            self.role[out] = "token"
        elif kind in ("ids", "ends") and op.target == "aten._to_copy.default":
            self.role[out] = str(kind)
            self.named[out] = self.named[first.name]  # type: ignore[union-attr]
        elif kind == "ids" and op.target in COUNTS:
            self._counted(op)
        elif kind == "counts" and op.target == "aten.cumsum.default":
            self.role[out], self.named[out] = "ends", ENDS
        elif op.target == "aten.index_put.default" and self._is_inverse(op):
            self.role[out] = "inverse"
        elif kind == "rows" and op.target in GROUPED_PRODUCTS:
            self._product(op)
        elif kind == "factors" and op.target == "aten.unsqueeze.default" and args[1] in (1, -1):
            self.role[out] = "factors"
        elif op.target == "aten.mul.Tensor" and "factors" in {self.role.get(n) for n in op.inputs()}:
            self._scaled(op)
        elif kind == "back" and op.target in _VIEWS and tensors[out].shape[:2] == (self.tokens, self.chosen):
            self.role[out] = "by token"
        elif kind == "by token" and op.target == "aten.sum.dim_IntList" and list(args[1]) == [1]:
            if len(tensors[out].shape) != 2 or tensors[out].shape != tensors[self.x].shape:
                raise _Unlike
            self.result = out
        else:
            self._row_by_row(op)

    def _scaled(self, op: Operator) -> None:
        rows = [name for name in op.inputs() if self.role.get(name) == "rows"]
        last = [call.results[0] for call in self.body[-1:]]
        if not last or len(op.inputs()) != 2 or [self.named[n] for n in rows] != last:
            raise _Unlike
        self.role[op.outputs[0]] = "scaled"

    def _looked_up(self, op: Operator, kind: str | None) -> None:
        source, (index, *more) = op.args
        out, by = op.outputs[0], self.role.get(index.name) if isinstance(index, Ref) else None
        if more:
            raise _Unlike
        if by == "token" and kind is None and not self.x:
            self.x, self.role[out], self.named[out] = source.name, "rows", ROWS
            if self.graph.tensors[self.x].shape[0] != self.tokens:
                raise _Unlike
        elif by == "order" and kind is None and not self.scale:
            self.scale = self._flattened(source.name, op)
            if self.graph.tensors[self.scale].shape != (self.tokens, self.chosen):
                raise _Unlike
            self.role[out] = "factors"
        elif by == "ids" and kind is None:
            self._call(op, self._weight(source.name))
            self.role[out] = "rows"
        elif by == "inverse" and kind == "scaled":
            self.role[out] = "back"
        else:
            raise _Unlike

    def _counted(self, op: Operator) -> None:
        (count,) = self.graph.tensors[op.outputs[0]].shape
        if "histc" in op.target and tuple(op.args[1:4]) != (count, 0, count - 1):
            raise _Unlike
        self.experts = count
        self.role[op.outputs[0]] = "counts"

    def _is_inverse(self, op: Operator) -> bool:
        """Return whether ``op`` inverts the permutation ``order``, by writing 0, 1, 2, ... at its indices."""
        _, places, values, *_ = op.args
        if not all(isinstance(value, Ref) for value in (*places, values)):
            return False
        rows = self.tokens * self.chosen
        known = self.graph.constants.get(values.name)
        return (
            [self.role.get(place.name) for place in places] == ["order"]
            and self.graph.tensors[values.name].kind == "constant"
            and self.graph.tensors[op.outputs[0]].shape == (rows,)
            # Without data the model is on the meta device; what else could be written there?
            and (known is None or known.is_meta or torch.equal(known, torch.arange(rows)))
        )

    def _product(self, op: Operator) -> None:
        _, weight, ends = op.args[:3]
        if op.kwargs or len(op.args) > 3 or not isinstance(ends, Ref) or self.role.get(ends.name) != "ends":
            raise _Unlike
        if self.role.get(weight.name) is not None:
            raise _Unlike
        self.module, self.source = self.module or op.module, self.source or op.source
        self._call(op, self._weight(weight.name))
        self.role[op.outputs[0]] = "rows"

    def _weight(self, name: str) -> Mapping[str, str]:
        """Map a weight's name to its name in the body (the calls that compute the experts). A transposed
        parameter is transposed inside the body, so that the new operator reads the parameter itself."""
        maker = self.graph.producer.get(name)
        if maker is not None and maker.target == TRANSPOSE and len(self.graph.consumers[name]) == 1:
            (source, *dims), shape = maker.args, self.graph.tensors[name].shape
            if len(shape) == 3 and {dim % 3 for dim in dims} == {1, 2}:
                made = f"${len(self.body)}"
                self.body.append(BodyCall(TRANSPOSE, (self._named_weight(source.name), 1, 2), (), (made,)))
                self.gone.add(maker.name)
                return {name: made}
        return {name: self._named_weight(name)}

    def _named_weight(self, name: str) -> str:
        if name not in self.weights:
            self.weights.append(name)
        return weight_name(self.weights.index(name))

    def _row_by_row(self, op: Operator) -> None:
        names = op.inputs()
        if any(self.role.get(name) != "rows" for name in names):
            raise _Unlike
        space = index_space(op, self.graph)
        firsts = {o.dims[0] if o.dims else () for o in (*space.reads, *space.writes)}
        if not space.known or len(firsts) != 1:
            raise _Unlike
        (first,) = firsts
        if len(first) != 1 or not space.dims[first[0]].splittable or "_to_copy" in op.target:
            raise _Unlike
        self._call(op, {})
        self.role.update(dict.fromkeys(op.outputs, "rows"))

    def _call(self, op: Operator, further: Mapping[str, str]) -> None:
        named = {**self.named, **further}

        def name_of(name: str) -> str:
            if name not in named:
                raise _Unlike
            return named[name]

        made = tuple(f"${len(self.body)}.{i}" if i else f"${len(self.body)}" for i in range(len(op.outputs)))
        args = tuple(map_refs(arg, name_of) for arg in op.args)
        kwargs = tuple((key, map_refs(value, name_of)) for key, value in op.kwargs.items())
        self.body.append(BodyCall(op.target, args, kwargs, made))
        self.named.update(zip(op.outputs, made, strict=True))

    # -- writing ----------------------------------------------------------------------------------

    def _written(self, number: int) -> OperatorGraph:
        graph, name = self.graph, f"experts_{number}" if number else "experts"
        while name in graph.tensors or name in graph.by_name:
            name += "_"
        made = replace(graph.tensors[self.result], name=name, dtype=graph.tensors[self.x].dtype)
        read, weights = map(Ref, (self.x, self.choice, self.scale)), [Ref(weight) for weight in self.weights]
        args = (*read, weights, plain(tuple(self.body)), self.experts)
        layer = Operator(name, EXPERTS, args, {}, (name,), self.module, self.source)

        names = {self.result: name}
        operators: list[Operator] = []
        for op in graph.operators:
            if self.result in op.outputs:
                operators.append(layer)
            elif op.name not in self.gone:
                operators.append(reading(op, names))
        gone = {out for op in graph.operators if op.name in self.gone for out in op.outputs}
        inputs = {n for op in operators for n in op.inputs()}
        tensors = {}
        for key, tensor in graph.tensors.items():
            if key == self.result:
                tensors[name] = made
            elif key not in gone and (tensor.kind != "constant" or key in inputs):
                tensors[key] = tensor
        constants = {key: value for key, value in graph.constants.items() if key in tensors}
        outputs = tuple(names.get(output, output) for output in graph.outputs)
        return replace(
            graph, tensors=tensors, operators=tuple(operators), constants=constants, outputs=outputs
        )
