"""A layer of experts as one operator: tokens go to the experts that a router chose, and results come back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tensoropt.graph import Ref
from tensoropt.ops.calls import (
    BY_VALUES,
    CostClass,
    InnerCollective,
    LocalCall,
    OperatorShard,
    OpSpec,
    Precision,
    Samples,
    Shape,
    literal,
)
from tensoropt.ops.families.experts import GROUPED_PRODUCTS
from tensoropt.ops.families.pointwise import ELEMENT_WISE
from tensoropt.ops.index_space import Builder, Loops, Opaque
from tensoropt.ops.kernels import ShardContext
from tensoropt.ops.overloads import resolve_overload

EXPERTS = "expert_kernels.experts"
"""The operator's and kernel's name; arguments: x, choice, factors, experts' weights, body, expert count."""
DISPATCH = "dispatch"
"""The name of the loop that splits both experts and tokens along one axis."""
_SPLIT, _SLICE = "aten.split.Tensor", "aten.slice.Tensor"
TRANSPOSE, INDEX = "aten.transpose.int", "aten.index.Tensor"
ROWS, EXPERT_OF_ROW, ENDS = "$x", "$experts", "$ends"


class BodyCall(NamedTuple):
    """One call of a body (the calls that compute an expert); names that begin with ``$`` are tensors."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[str, ...]


_Body = tuple[BodyCall, ...]


def _body_of(data: Sequence[Any]) -> _Body:
    return tuple(
        BodyCall(target, tuple(args), tuple((k, v) for k, v in kwargs), tuple(results))
        for target, args, kwargs, results in data
    )


def plain(body: _Body) -> tuple[Any, ...]:
    """Convert a body (the calls that compute an expert) to tuples, the inverse of :func:`_body_of`."""
    return tuple(map(tuple, body))


def weight_name(number: int) -> str:
    """Return the name of a weight inside a body (the calls that compute an expert), given its number."""
    return f"$w{number}"


def _operands_of(value: Any) -> list[str]:
    """Return the names of tensors in an argument of a :class:`BodyCall`, in order."""
    if isinstance(value, str):
        return [value] if value.startswith("$") else []
    if isinstance(value, (list, tuple)):
        return [name for item in value for name in _operands_of(item)]
    return []


# -- index spaces ---------------------------------------------------------------------------------


class _Whole(Exception):  # noqa: N818 - a signal, not an error
    """Raised if an expert's hidden features cannot be split, because their use is not recognised."""


_Dim = tuple[str, ...] | None
"""A dim as the product of ``features`` and ``parts``, outermost first; None for any other dim."""


class _Features:
    """The hidden features of an expert: results of the first matrix products, summed over in the last one.

    Attributes:
        size: number of hidden features.
        parts: number of equal parts of the first products' results; 2 for a gate and a value.
        dims: dims of each weight without the experts' dim, by the weight's number.
        added: numbers of the biases that are added after the last product.
    """

    def __init__(self, body: _Body, shapes: Sequence[tuple[int, ...]]):
        """Find the hidden features in ``body``, the calls that compute an expert.

        Args:
            shapes: the shape of each weight, with the experts' dim first.

        Raises:
            _Whole: the hidden features cannot be split.
        """
        self.shapes = shapes
        self.dims: dict[int, list[_Dim]] = {}
        self.added: set[int] = set()
        # As the body sees a weight: its number, and whether its last two dims are exchanged.
        self._weights = {weight_name(i): (i, False) for i in range(len(shapes))}
        self._made: dict[str, _Dim] = {ROWS: None}
        self._biases: dict[str, int] = {}
        products = [call for call in body if call.target in GROUPED_PRODUCTS]
        for call in body:
            if call.target == TRANSPOSE and call.args[0] in self._weights:
                number, exchanged = self._weights[call.args[0]]
                self._weights[call.results[0]] = number, not exchanged
        if len(products) < 2:
            raise _Whole
        self._last = products[-1]
        number, exchanged = self._weight_of(self._last)
        self.size = shapes[number][2 if exchanged else 1]
        number, exchanged = self._weight_of(products[0])
        self.parts = shapes[number][1 if exchanged else 2] // self.size
        self._whole_dim = self._joined(body)
        for call in body:
            self._read(call)

    def _weight_of(self, product: BodyCall) -> tuple[int, bool]:
        if product.args[1] not in self._weights:
            raise _Whole
        return self._weights[product.args[1]]

    def _joined(self, body: _Body) -> _Dim:
        if self.parts == 1:
            return ("features",)
        ways = set()
        for call in body:
            if call.target == _SPLIT:
                size, dim = call.args[1], call.args[2] if len(call.args) > 2 else 0
                ways.add(("parts", "features") if size == self.size and dim in (1, -1) else None)
            elif call.target == _SLICE:
                step, dim = call.args[4] if len(call.args) > 4 else 1, call.args[1]
                ways.add(("features", "parts") if step == self.parts and dim in (1, -1) else None)
        if len(ways) != 1:
            raise _Whole
        return ways.pop()

    def _read(self, call: BodyCall) -> None:
        first, given = call.args[0], [n for n in _operands_of((call.args, call.kwargs)) if n in self._made]
        if call.target in GROUPED_PRODUCTS:
            self._made[call.results[0]] = self._product(call)
        elif call.target == INDEX and first in self._weights:
            self._biases[call.results[0]] = self._weights[first][0]
        elif call.target in (_SPLIT, _SLICE) and self._made.get(first) == self._whole_dim and self.parts > 1:
            self._made.update(dict.fromkeys(call.results, ("features",)))
        elif call.target in ELEMENT_WISE:
            self._made[call.results[0]] = self._element_wise(call, given)
        elif call.target != TRANSPOSE or first not in self._weights:
            raise _Whole

    def _product(self, call: BodyCall) -> _Dim:
        number, exchanged = self._weight_of(call)
        last = call is self._last
        read, made = (("features",), None) if last else (None, self._whole_dim)
        width = self.shapes[number][1 if exchanged else 2]
        if number in self.dims or self._made.get(call.args[0], ()) != read:
            raise _Whole
        if not last and (call.args[0] != ROWS or width != self.size * self.parts):
            raise _Whole
        self.dims[number] = [made, read] if exchanged else [read, made]
        return made

    def _element_wise(self, call: BodyCall, given: Sequence[str]) -> _Dim:
        kinds = {self._made[name] for name in given}
        biases = [n for name in _operands_of(call.args) if (n := self._biases.get(name)) is not None]
        if len(kinds) != 1 or any(len(self.shapes[bias]) != 2 for bias in biases):
            raise _Whole
        (kind,) = kinds
        # Behind the last product are sums of parts, to which only a bias may be added.
        if kind is None and not (biases and call.target == "aten.add.Tensor" and len(call.args) == 2):
            raise _Whole
        self.dims.update((bias, [kind]) for bias in biases)
        self.added.update(biases if kind is None else ())
        return kind


def _experts(b: Builder) -> None:
    """Describe ``y[t, :] = sum_k scale[t, k] body(x[t, :], weights[choice[t, k]])``.

    Tokens, experts and each expert's hidden features may be split, and tokens and experts by one axis.
    """
    x, choice, scale, weights, data, count = b.op.args
    tokens = b.tensor(x).shape[0]
    shapes = [b.tensor(w).shape for w in weights]
    if any(shape[0] != count for shape in shapes):
        raise Opaque(b.op.name)
    rows, experts = b.loop("rows", tokens), b.loop("experts", count)
    dims: Mapping[int, Sequence[_Dim]] = {}
    added: Collection[int] = ()
    loops: dict[str, int] = {}
    with contextlib.suppress(_Whole):
        inner = _Features(_body_of(data), shapes)
        dims, added = inner.dims, inner.added
        loops["features"] = b.loop("features", inner.size)
        loops["parts"] = b.loop("parts", inner.parts, splittable=False)
    b.read(x, [rows, None])
    b.read(choice, [rows, None])
    b.read(scale, [rows, None])
    for number, weight in enumerate(weights):
        labels: list[Loops] = [experts]
        for dim in dims.get(number, (None,) * (len(shapes[number]) - 1)):
            labels.append(None if dim is None else [loops[name] for name in dim])
        b.read(weight, labels, added=number in added)
    b.write([rows, None])
    # Last, so that strategies that follow the batch find plain data parallelism first.
    b.together(DISPATCH, (rows, experts))


# -- calls of one shard ---------------------------------------------------------------------------


class _SplitExperts(NamedTuple):
    """A mesh axis that splits the experts.

    Attributes:
        axis, parts: number of the axis, and its size.
        exchanged: whether the axis splits tokens too, so that tokens are sent along it.
    """

    axis: int
    parts: int
    exchanged: bool


def _local_experts(shard: OperatorShard, call: LocalCall) -> LocalCall:
    x, choice, scale, weights, data, count = call.args
    sent, features = shard.split(shard.loop_named(DISPATCH)), shard.split(shard.loop_named("features"))
    body = _body_of(data)
    if features:
        body = _narrowed(body, math.prod(shard.mesh[a] for a in features))
    axes = sorted({*sent, *shard.split(shard.loop_named("experts"))})
    split = tuple(_SplitExperts(axis, shard.mesh[axis], axis in sent) for axis in axes)
    if not split:
        return replace(call, args=(x, choice, scale, weights, plain(body), count))
    width = shard.read_shape(0)[1]
    expected = _expected_rows(_rows_of_tokens(shard, choice), split, shard.atoms.graph.expert_imbalance)
    tensor = shard.atoms.graph.tensors[x.name]
    collectives: tuple[InnerCollective, ...] = ()
    if sent:
        blocks = math.prod(one.parts for one in split)
        peers = math.prod(shard.mesh[a] for a in sent)
        counts = InnerCollective("all_to_all", sent, peers * count // blocks * _COUNT_BYTES)
        rows = InnerCollective(BY_VALUES, sent, expected * width * tensor.element_bytes)
        forth, back = (rows, rows), (replace(rows, backward=True),) * 2
        collectives = (counts, *forth, *back)
    args = (x, choice, scale, weights, plain(body), count, tuple(map(tuple, split)), expected)
    return LocalCall(EXPERTS, args, {}, call.name, (), collectives)


_COUNT_BYTES = 8


def _rows_of_tokens(shard: OperatorShard, choice: Ref) -> int:
    if not shard.split(shard.loop_named(DISPATCH)):
        return math.prod(shard.read_shape(1))
    tokens, chosen = shard.atoms.graph.tensors[choice.name].shape
    layout = shard.layout(shard.space.reads[1], written=False)
    parts = math.prod(shard.mesh[axis] for axis, code in enumerate(layout) if code >= 0)
    return -(-tokens // parts) * chosen


def _expected_rows(rows: int, split: Sequence[_SplitExperts], imbalance: float) -> int:
    """Return the number of rows that a rank is expected to compute, if every rank sends equally many.

    Args:
        rows: number of rows of one rank (one row per token and chosen expert).
        imbalance: rows of the busiest rank, divided by the ranks' mean.
    """
    peers = math.prod(one.parts for one in split if one.exchanged)
    blocks = math.prod(one.parts for one in split)
    # From each of them no more than all that it has.
    return min(math.ceil(rows * imbalance / blocks), rows) * peers


def _narrowed(body: _Body, parts: int) -> _Body:
    return tuple(
        call._replace(args=(call.args[0], call.args[1] // parts, *call.args[2:]))
        if call.target == _SPLIT
        else call
        for call in body
    )


# -- kernels --------------------------------------------------------------------------------------


class _Rows(torch.autograd.Function):
    """The rows ``index`` of ``x`` with each row repeated ``times`` times, without storing that matrix."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.tokens, ctx.times = x.shape[0], times
        return x.index_select(0, index // times)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        if len(index) == ctx.tokens * ctx.times:
            rows = torch.empty_like(grad).index_copy_(0, index, grad)
            return rows.unflatten(0, (ctx.tokens, ctx.times)).sum(1), None, None
        return grad.new_zeros(ctx.tokens, grad.shape[1]).index_add_(0, index // ctx.times, grad), None, None


class _Exchanged(torch.autograd.Function):
    """An all-to-all of rows between ranks; backward sends the gradients in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        context: ShardContext,
        axes: tuple[int, ...],
        sent: list[int],
        received: list[int],
    ) -> torch.Tensor:
        ctx.context, ctx.axes, ctx.sizes = context, axes, (received, sent)
        return context.all_to_all(rows, axes, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.context.all_to_all(grad, ctx.axes, *ctx.sizes), None, None, None, None


class _Routes(NamedTuple):
    """The routing of one rank: the rows (one per token and chosen expert) that it sends and receives.

    Attributes:
        rows: numbers of the rows that it sends, in sending order.
        experts: local number of the expert for each received row.
        sent, received: number of rows to each rank, and from each rank.
    """

    rows: torch.Tensor
    experts: torch.Tensor
    sent: list[int]
    received: list[int]


def _routes(
    context: ShardContext, choice: torch.Tensor, count: int, split: Sequence[_SplitExperts], expected: int
) -> _Routes:
    axes = tuple(one.axis for one in split if one.exchanged)
    peers = _blocks(context, split)
    own = count // math.prod(one.parts for one in split)
    if context.alone or isinstance(choice, FakeTensor):
        # Without a router's choice, every expert gets the same number of rows.
        index = torch.arange(expected, device=choice.device)
        if axes:
            context.all_to_all(choice.new_zeros(len(peers), own), axes)
        even = [expected // len(peers)] * len(peers)
        # Received rows are sorted by sender, then expert; a rank's own by expert.
        ids = index % own if axes else index * own // expected
        return _Routes(index % choice.numel(), ids, even, even)
    index = choice.flatten().sort(stable=True).indices
    counts = torch.bincount(choice.flatten(), minlength=count)
    sends = counts.view(-1, own)[peers]
    arrives = context.all_to_all(sends, axes) if axes else sends
    ends = counts.view(-1, own).sum(1).cumsum(0)
    # The one moment at which the host waits for the router.
    ends_of, sent, received = (
        part.tolist()
        for part in torch.cat((ends, sends.sum(1), arrives.sum(1))).split((len(ends), len(peers), len(peers)))
    )
    # The rows of a block of experts lie together: one block for each rank that rows are sent to.
    parts = [index[ends_of[block] - rows : ends_of[block]] for block, rows in zip(peers, sent, strict=True)]
    experts = torch.arange(own, device=choice.device).repeat(len(peers)).repeat_interleave(arrives.flatten())
    return _Routes(torch.cat(parts), experts, sent, received)


def _blocks(context: ShardContext, split: Sequence[_SplitExperts]) -> list[int]:
    """Return the index of each block of experts to whose ranks this rank sends tokens; if it sends none, only
    the index of its own block."""
    blocks = [0]
    for one in split:
        along = range(one.parts) if one.exchanged else [context.coordinate((one.axis,))]
        blocks = [block * one.parts + place for block in blocks for place in along]
    return blocks


def _run(body: _Body, values: dict[str, Any]) -> torch.Tensor:
    def bound(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$"):
            return values[value]
        if isinstance(value, (list, tuple)):
            return type(value)(bound(item) for item in value)
        return literal(value)

    for call in body:
        result = resolve_overload(call.target)(
            *map(bound, call.args), **{k: bound(v) for k, v in call.kwargs}
        )
        results = (result,) if isinstance(result, torch.Tensor) else result
        values.update(zip(call.results, results, strict=True))
    last: torch.Tensor = values[body[-1].results[0]]
    return last


def experts(
    context: ShardContext,
    name: str,
    x: torch.Tensor,
    choice: torch.Tensor,
    scale: torch.Tensor,
    weights: Sequence[torch.Tensor],
    body: Sequence[Any],
    count: int,
    split: Sequence[Sequence[Any]] = (),
    expected: int = 0,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' results for each token.

    Args:
        x: ``[tokens, width]``.
        choice: ``[tokens, chosen]``, numbers of experts.
        scale: ``[tokens, chosen]``, factor of each chosen expert's result.
        weights: ``[experts,...]`` each, for this rank's experts.
        body: calls that compute an expert, as data of :class:`BodyCall`.
        count: number of all experts.
        split: data of :class:`_SplitExperts` for each axis that splits the experts.
        expected: predicted number of rows of this rank, used for fake tensors and in single processes.

    Returns:
        ``[tokens, width]``, a partial sum if some experts' ranks exchange no tokens with this rank.
    """
    times, calls, axes = choice.shape[1], _body_of(body), tuple(_SplitExperts(*one) for one in split)
    over = tuple(one.axis for one in axes if one.exchanged)
    if axes:
        routes = _routes(context, choice, count, axes, expected)
    else:
        chosen, index = choice.flatten().sort(stable=True)
        routes = _Routes(index, chosen, [], [])
    own = count // math.prod(one.parts for one in axes)
    rows = _Rows.apply(x, routes.rows, times)
    if over:
        rows = _Exchanged.apply(rows, context, over, routes.sent, routes.received)
    ids, order = routes.experts, None
    if over and own > 1:
        ids, order = ids.sort(stable=True)
        rows = rows.index_select(0, order)
    ends = torch.searchsorted(ids, torch.arange(own, device=ids.device), right=True, out_int32=True)
    values = {ROWS: rows, EXPERT_OF_ROW: ids, ENDS: ends}
    del rows  # the body's values alone keep them
    values |= {weight_name(number): weight for number, weight in enumerate(weights)}
    made = _run(calls, values)
    values.clear()
    if order is not None:
        made = made.index_select(0, order.argsort())
    if over:
        made = _Exchanged.apply(made, context, over, routes.received, routes.sent)
    if all(one.exchanged for one in axes) and len(routes.rows) == choice.numel():
        made = made.index_select(0, routes.rows.argsort()).unflatten(0, choice.shape)
        return (made * scale.unsqueeze(-1)).sum(1).to(x.dtype)
    scaled = made * scale.flatten().index_select(0, routes.rows).unsqueeze(-1)
    total = scaled.new_zeros(x.shape[0], scaled.shape[1])
    return total.index_add(0, routes.rows // times, scaled).to(x.dtype)


def _choices(args: tuple[Any, ...], shape: Shape) -> list[tuple[str, tuple[int, int]]]:
    return [(args[1].name, (0, args[5]))] if isinstance(args[1], Ref) else []


SPECS = (
    OpSpec(
        targets=(EXPERTS,),
        rule=_experts,
        localiser=_local_experts,
        kernels={EXPERTS: experts},
        samples=Samples(limits=_choices),
        cost_class=CostClass.MATRIX,
        precision=Precision.NARROW,
    ),
)
