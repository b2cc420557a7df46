"""Parameters of plans whose ranks have different ones, as scripts compute with them.

A rank has some parameters, or shards of them, and an empty tensor in place of each other one. The result of
an element-wise computation remains such a part; sums, means and norms of all elements are taken over all
ranks, are the same on each, and go backward into each rank's part. Anything else with a gradient would be
right on no rank, and is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from tensoropt.engine.together import JobRanks
from tensoropt.errors import PlanError

_ELEMENTWISE = frozenset((
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "pow", "square",
    "abs", "absolute", "neg", "negative", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "log2", "tanh",
    "sigmoid", "relu", "softplus", "sign", "sgn", "clamp", "clamp_min", "clamp_max", "erf", "sin", "cos",
    "reciprocal", "float", "double", "half", "bfloat16", "type_as", "clone", "detach", "contiguous",
    "flatten", "ravel", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__neg__", "__abs__",
))  # fmt: skip
_FLAT = frozenset({"view", "reshape"})
_JOINED = frozenset({"cat", "concat", "concatenate"})
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WHAT = "a sum or norm of parameters; compute it on every rank, and print it on one"


class SpreadValue(torch.Tensor):
    """This rank's part of a parameter, or of what was computed from its single elements.

    Attributes:
        together: the ranks that have the parts.
        share: the weight of one of several ranks with the same part; by element if parts were joined.
        count: the number of elements of the whole.
        key: the parameters of which it is a part.
        whole: the shape of the whole.
        cut: returns this rank's part of a tensor of that shape.
    """

    together: JobRanks
    share: float | torch.Tensor
    count: int
    key: tuple[str, ...]
    whole: tuple[int, ...]
    cut: Callable[[torch.Tensor], torch.Tensor] | None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ELEMENTWISE or (name in _FLAT and args[1:] in ((-1,), ((-1,),))) or func == _DATA:
                return _elementwise(func, args, kwargs)
            if name in _JOINED and not kwargs and args[1:] in ((), (0,)):
                return _joined(func, args[0])
            if name in _REDUCTIONS and (found := _REDUCTIONS[name](func, args, kwargs)) is not None:
                return found
            if name == "__deepcopy__":
                return copy.deepcopy(_plain(args[0]).detach(), *args[1:])
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                if torch.is_grad_enabled() and any(
                    part.numel() < part.count for part in _parts(args, kwargs)
                ):
                    raise _refused(func, args, kwargs) from error
                raise
        for value in result if isinstance(result, (tuple, list)) else (result,):
            # What is no result of arithmetic has none, or is the parameter itself.
            if isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, cls):
                raise _refused(func, args, kwargs)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _plain(self).__reduce_ex__(protocol)


# Else optimizers on GPUs would take one parameter at a time.
optimizers._foreach_supported_types.append(SpreadValue)


def spread_value(
    part: torch.Tensor,
    together: JobRanks,
    copies: int,
    key: str,
    whole: Sequence[int],
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> SpreadValue:
    """Return a rank's part of a parameter for scripts, given the number of ranks that have the same one."""
    found = part.as_subclass(SpreadValue)
    count = 1
    for size in whole:
        count *= size
    found.together, found.share, found.count = together, 1.0 / copies, count
    found.key, found.whole, found.cut = (key,), tuple(whole), cut
    return found


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, SpreadValue) else value


def _like(found: torch.Tensor, one: SpreadValue) -> SpreadValue:
    value = found.as_subclass(SpreadValue)
    value.together, value.share, value.count = one.together, one.share, one.count
    value.key, value.whole, value.cut = one.key, one.whole, one.cut
    return value


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = _parts(args, kwargs)
    one = parts[0]
    if any(part.key != one.key for part in parts):
        raise _refused(func, args, kwargs)
    args = tuple(_cut(value, one) for value in args)
    found = func(*args, **kwargs)
    share = one.share
    if isinstance(share, torch.Tensor) and share.shape != found.shape:
        share = share.reshape(found.shape)
    value = _like(found, one)
    value.share = share
    return value


def _cut(value: Any, one: SpreadValue) -> Any:
    """Return what belongs to this rank's part of a tensor that is combined with it."""
    if not isinstance(value, torch.Tensor) or not value.dim() or value.shape == one.shape:
        return value
    if not isinstance(value, SpreadValue) and tuple(value.shape) == one.whole and one.cut is not None:
        return one.cut(value)
    raise PlanError(
        f"{one.key[0]}, of which this rank has {tuple(one.shape)} under this plan, is combined with a tensor "
        f"of shape {tuple(value.shape)}; tensors of the parameter's own shape {one.whole} are followed"
    )


def _joined(func: Any, parts: Sequence[Any]) -> Any:
    if not all(isinstance(part, SpreadValue) and part.dim() == 1 for part in parts):
        raise _refused(func, (parts,), {})
    found = _like(func([_plain(part) for part in parts]), parts[0])
    found.share = torch.cat([torch.zeros_like(_plain(p).detach()) + p.share for p in parts])
    found.count = sum(part.count for part in parts)
    found.key = tuple(key for part in parts for key in part.key)
    found.whole, found.cut = (found.count,), None
    return found


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, value: SpreadValue) -> torch.Tensor:
        ctx.shape = part.shape
        own = (part * value.share).sum(dtype=torch.float64)
        return value.together.summed(own, _WHAT).to(part.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient.expand(ctx.shape), None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, value: SpreadValue, order: float) -> torch.Tensor:
        powers = (part.double().abs() ** order * value.share).sum()
        total = value.together.summed(powers, _WHAT) ** (1.0 / order)
        ctx.order = order
        ctx.save_for_backward(part, total.to(part.dtype))
        return total.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        part, total = ctx.saved_tensors
        one = part if ctx.order == 2.0 else part.sign() * part.abs() ** (ctx.order - 1.0)
        scale = total ** (ctx.order - 1.0)
        # PyTorch's subgradient where all is zero.
        return gradient * torch.where(scale == 0, 0.0, one / scale), None, None


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if len(args) != 1 or kwargs:
        return None
    found: torch.Tensor = _Sum.apply(_plain(args[0]), args[0])
    return found


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    found = _sum(func, args, kwargs)
    return None if found is None else found / args[0].count


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    asked = kwargs.pop("p", kwargs.pop("ord", args[1] if len(args) > 1 else None))
    # Over some dims, or in another type.
    if any(value not in (None, False) for value in (*args[2:], *kwargs.values())):
        return None
    # For a matrix these are norms of another kind.
    if func is torch.linalg.norm and asked is not None and len(args[0].whole) > 1:
        return None
    order = 2.0 if asked in (None, "fro") else asked
    if not isinstance(order, (int, float)) or not 0 < order < float("inf"):
        return None
    found: torch.Tensor = _Norm.apply(_plain(args[0]), args[0], float(order))
    return found


def _norms(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = []
    for value in args[0]:
        if not isinstance(value, SpreadValue):
            return None
        if (norm := _norm(None, (value, *args[1:]), kwargs)) is None:
            return None
        found.append(norm)
    return found


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return _sum(None, (_elementwise(torch.mul, args, kwargs),), {})


def _distance(power: int) -> Callable[..., torch.Tensor | None]:
    def distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        others = {name: value for name, value in kwargs.items() if value is not None}
        reduction = others.pop("reduction", "mean")
        if len(args) != 2 or others or reduction not in ("mean", "sum"):
            return None
        difference = _elementwise(torch.sub, args, {})
        each = _elementwise(torch.abs if power == 1 else torch.square, (difference,), {})
        return (_mean if reduction == "mean" else _sum)(None, (each,), {})

    return distance


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "_foreach_norm": _norms,
    "dot": _dot,
    "l1_loss": _distance(1),
    "mse_loss": _distance(2),
}


def _parts(args: Any, kwargs: Any) -> list[SpreadValue]:
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    return [value for value in flat if isinstance(value, SpreadValue)]


def _refused(func: Any, args: Any, kwargs: Any) -> PlanError:
    # Of an attribute (p.T) its getter is called.
    of = getattr(func, "__self__", None)
    name = of.__name__ if inspect.isgetsetdescriptor(of) else getattr(func, "__name__", str(func))
    keys = dict.fromkeys(key for part in _parts(args, kwargs) for key in part.key)
    return PlanError(
        f"the script computes {name} of {' and '.join([*keys][:2])}, of which ranks have parts under this "
        "plan: outside of the model, operators on single elements of parameters are followed, and sum(), "
        "mean() and norm() of all elements; compute the rest inside of the model's forward, or choose a "
        "sharded plan"
    )
