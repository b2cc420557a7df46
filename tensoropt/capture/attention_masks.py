"""The replacement of constant attention masks: a causal mask becomes PyTorch's flag ``is_causal``, and a mask
that hides nothing is dropped.

The mask may be an operand of attention, or an addend in attention written out by hand
(``softmax(q k^T * scale + mask) v``). With the flag no ``[queries, keys]`` tensor exists, and kernels skip
hidden positions. Only a constant mask that hides the keys after each query, and nothing else,
becomes the flag."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from tensoropt.capture.folding import Folder, arguments_of, broadcast_narrowed, renamed
from tensoropt.graph import Operator
from tensoropt.ops.families.attention import ATTENTION

_NOTHING, _FUTURE = "nothing", "future"
"""What a recognised mask hides: nothing, or the future (a causal mask)."""
_HIDDEN = -1e4
"""The largest number that hides a position when it is added to the position's score: exp(-104) is already 0
in float32, and scores differ by tens."""
_LEAST_FACTOR = 0.02
"""The least factor by which scores may be multiplied after a mask was added: ``_HIDDEN`` times this factor
still gives an attention weight of zero."""
_SOFTMAX = "aten.softmax.int"
_BY_HAND = ("aten.matmul.default", "aten.bmm.default")


def _hides(value: Any, inverted: bool) -> str | None:
    """Return what a mask ``[..., queries, keys]`` hides: ``nothing``, ``future`` (the keys after each query),
    or None for any other mask and for one without values. A boolean mask is True at visible positions (at
    hidden ones if ``inverted``); a mask of numbers is added to the scores."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.dim() < 2:
        return None
    boolean = value.dtype == torch.bool
    if inverted and not boolean:
        return None
    queries, keys = value.shape[-2:]
    value = broadcast_narrowed(value)
    if value.numel() not in (1, queries * keys):
        return None
    value = value.reshape(value.shape[-2:])
    future = torch.ones(queries, keys, dtype=torch.bool, device="cpu").triu(1)
    seen = value ^ inverted if boolean else value == 0
    hidden = ~seen if boolean else value <= _HIDDEN
    if bool(seen.all()):
        return _NOTHING
    if seen.shape == future.shape and torch.equal(seen, ~future) and torch.equal(hidden, future):
        return _FUTURE
    return None


class MaskReader:
    """A reader of a graph's constant attention masks, which examines each mask once.

    Attributes:
        flagged: number of attention calls whose mask was dropped or replaced by ``is_causal``.
        by_hand: number of attention computations written out by hand that became one call.
    """

    def __init__(self, folder: Folder, read_stored: bool):
        self._folder, self._read_stored = folder, read_stored
        self._found: dict[tuple[int, bool], str | None] = {}
        self.flagged = self.by_hand = 0

    def known(self, node: Any) -> bool:
        """Return whether ``node`` is a constant whose value may influence the graph. Values that a model on
        the meta device lacks may do so only if ``read_stored`` is set."""
        if not isinstance(node, torch.fx.Node) or node not in self._folder:
            return False
        return self._read_stored or self._folder.decides(node)

    def number(self, node: Any) -> float | None:
        """Return the one number that all elements of an argument or constant equal; else None."""
        if isinstance(node, (int, float)):
            return float(node)
        if not self.known(node):
            return None
        value = self._folder.value(node)
        if not isinstance(value, torch.Tensor):
            return float(value) if isinstance(value, (int, float)) else None
        value = broadcast_narrowed(value)
        return None if value.is_meta or value.numel() != 1 else float(value)

    def hides(self, node: Any, *, inverted: bool = False) -> str | None:
        """Return what a mask hides: ``nothing``, ``future`` (the keys after each query), or None if it hides
        something else or is not :meth:`known`. A boolean mask is True at visible positions, at hidden ones if
        ``inverted``."""
        if not self.known(node):
            return None
        value = self._folder.value(node)
        key = id(value), inverted  # the folder keeps the value
        if key not in self._found:
            self._found[key] = _hides(value, inverted)
        return self._found[key]

    def notes(self, operators: Iterable[Operator]) -> tuple[str, ...]:
        """Return notes for the user on replaced masks, and on ``operators`` that compute constants too large
        to be stored."""
        notes = []
        if self.flagged:
            notes.append(
                f"{self.flagged} attention masks are left out: causal masks are replaced by the flag "
                "is_causal, and the others hide nothing"
            )
        if self.by_hand:
            notes.append(
                f"attention that the model writes out with a causal mask ({self.by_hand} times) runs as "
                "scaled_dot_product_attention with is_causal"
            )
        places = [self._folder.live[op.name] for op in operators if op.name in self._folder.live]
        if places:
            notes.append(
                f"{len(places)} results that depend on constants only are too large to be stored, and are "
                f"computed in every step: {', '.join(dict.fromkeys(places))}; if they are causal masks, pass "
                "is_causal=True to scaled_dot_product_attention instead, which costs less"
            )
        return tuple(notes)


def with_flag(node: torch.fx.Node, masks: MaskReader) -> None:
    """Drop the mask of an attention call if the mask hides nothing; replace a causal mask with the flag."""
    if str(node.target) != ATTENTION:
        return
    given = arguments_of(node)
    mask = given["attn_mask"]
    hidden = masks.hides(mask)
    if hidden is None or given["is_causal"]:
        return
    # One row for all queries shows the same keys to each of them.
    sizes = tuple(n.meta["val"].shape[-2] for n in node.args[:2])  # type: ignore[union-attr]
    if hidden == _FUTURE and tuple(mask.meta["val"].shape[-2:]) != sizes:
        return
    node.args = (*node.args[:3], None, given["dropout_p"], hidden == _FUTURE)
    node.kwargs = {k: v for k, v in node.kwargs.items() if k in ("scale", "enable_gqa")}
    masks.flagged += 1


def _attention_before(
    node: torch.fx.Node, q: torch.fx.Node, k_transposed: torch.fx.Node, v: torch.fx.Node, scale: float
) -> list[torch.fx.Node]:
    """Insert causal attention before ``node``; return the inserted calls, of which attention is the last."""
    calls: list[torch.fx.Node] = []
    aten = torch.ops.aten
    k = _untransposed(k_transposed)
    with node.graph.inserting_before(node):
        if k is None:
            k = node.graph.call_function(aten.transpose.int, (k_transposed, -2, -1))
            k.meta = {**node.meta, "val": k_transposed.meta["val"].transpose(-2, -1)}
            calls.append(k)
        attention = aten.scaled_dot_product_attention.default
        calls.append(node.graph.call_function(attention, (q, k, v, None, 0.0, True), {"scale": scale}))
        calls[-1].meta = dict(node.meta)
    return calls


def _untransposed(node: torch.fx.Node) -> torch.fx.Node | None:
    if str(node.target) != "aten.transpose.int":
        return None
    source, *dims = node.args
    rank = node.meta["val"].dim()
    exchanged = {int(dim) % rank for dim in dims} == {rank - 2, rank - 1}  # type: ignore[arg-type]
    return source if exchanged and isinstance(source, torch.fx.Node) else None


def attention_by_hand(node: torch.fx.Node, masks: MaskReader) -> list[torch.fx.Node] | None:
    """Insert an equivalent causal attention call before ``node`` if ``node`` is the last product of
    ``softmax(q k^T * scale + causal mask) v``. Return the inserted calls, or None for any other node.

    The intermediate results must have one floating-point dtype and no other readers. A computation with
    dropout is left unchanged: PyTorch's attention with dropout stores the attention weights even under the
    flag, and the mask is small next to them.
    """
    if str(node.target) not in _BY_HAND or len(node.all_input_nodes) != 2:
        return None
    weights, v = node.args[:2]
    softmax = _renamed(weights)
    if softmax is None or str(softmax.target) != _SOFTMAX or not isinstance(v, torch.fx.Node):
        return None
    shape = softmax.meta["val"].shape
    if len(shape) != 4 or softmax.args[1] not in (-1, 3):
        return None
    scale, masked = 1.0, False
    scores = _renamed(softmax.args[0])
    while scores is not None and str(scores.target) not in _BY_HAND:
        step = _step(scores, masks)
        if step is None:
            return None
        factor, hidden, inner = step
        if hidden == _FUTURE and scale < _LEAST_FACTOR:
            return None
        masked = masked or hidden == _FUTURE
        scale *= factor
        scores = _renamed(inner)
    if scores is None or not masked or scale <= 0:
        return None
    q, k = scores.args[:2]
    if not (isinstance(q, torch.fx.Node) and isinstance(k, torch.fx.Node)):
        return None
    values = [n.meta["val"] for n in (q, k, v, scores, softmax)]
    alike = len({value.dtype for value in values}) == 1 and values[0].is_floating_point()
    lead = len({tuple(value.shape[:-2]) for value in values}) == 1
    if not (alike and lead):
        return None
    masks.by_hand += 1
    return _attention_before(node, q, k, v, scale)


def _renamed(node: Any) -> torch.fx.Node | None:
    """Return the call whose result ``node`` copies or views unchanged, or ``node`` itself if it changes its
    operand. Return None if ``node``, that call or a copy between them has a second reader."""
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and _readers(node) == 1:
        source = renamed(node)
        if source is None:
            return node
        node = source
    return None


def _readers(node: torch.fx.Node) -> int:
    return sum(not str(user.target).startswith("aten._assert") for user in node.users)


def _step(node: torch.fx.Node, masks: MaskReader) -> tuple[float, str | None, Any] | None:
    name, args = str(node.target), cast(tuple[Any, ...], node.args)
    if name in ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"):
        factor = masks.number(args[1])
        if factor is not None and factor != 0:
            return (1 / factor if ".div." in name else factor), None, args[0]
        factor = masks.number(args[0]) if ".mul." in name else None
        return None if factor is None else (factor, None, args[1])
    if name == "aten.add.Tensor" and node.kwargs.get("alpha", 1) == 1:
        for scores, mask in (args[:2], args[1::-1]):
            hidden = masks.hides(mask) if _spans(mask, node) else None
            if hidden is not None and mask.meta["val"].dtype != torch.bool:
                return 1.0, hidden, scores
        return None
    if name in ("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"):
        fill = masks.number(args[2])
        hidden = masks.hides(args[1], inverted=True) if _spans(args[1], node) else None
        return (1.0, hidden, args[0]) if fill is not None and fill <= _HIDDEN and hidden else None
    if name in ("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"):
        for scores, other, inverted in ((args[1], args[2], False), (args[2], args[1], True)):
            fill = masks.number(other)
            hidden = masks.hides(args[0], inverted=inverted) if _spans(args[0], node) else None
            if fill is not None and fill <= _HIDDEN and hidden:
                return 1.0, hidden, scores
    return None


def _spans(mask: Any, node: torch.fx.Node) -> bool:
    if not isinstance(mask, torch.fx.Node):
        return False
    return tuple(mask.meta["val"].shape[-2:]) == tuple(node.meta["val"].shape[-2:])
