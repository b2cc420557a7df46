"""Sums, norms and other numbers that scripts compute from split parameters, by collectives over the ranks."""

from __future__ import annotations

import atexit
import contextlib
import copy
import inspect
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import optimizer as optimizers

from tensoropt.errors import PlanError

LOOKS_AFTER_S, SURE_AFTER_S = 1.0, 3.0
"""Seconds that a rank waits before it looks for ranks that moved on, and then before it raises an error."""
_alive: weakref.WeakSet[JobRanks] = weakref.WeakSet()


class JobRanks:
    """The ranks of a job, for collectives in a script's own computations; created on every rank."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # On the host, and of its own: what one rank alone sends here meets nothing of the plan's.
        # A fake rank has no others beside it, and no network that gloo could use.
        self._fake = dist.get_backend() == "fake"
        self._group: Any = dist.new_group(backend=None if self._fake else "gloo")
        self._store: Any = dist.distributed_c10d._get_default_store()
        # The same on all ranks, and no other group's.
        self._name = f"tensoropt/{self._group.group_name}"
        self._calls = 0
        if not _alive:
            atexit.register(leave)
        _alive.add(self)

    def went_on(self) -> None:
        """Record that this rank begins another call of the model."""
        self._calls += 1
        if self._fake:
            return
        self._store.set(f"{self._name}/calls/{self.rank}", str(self._calls))

    def summed(self, value: torch.Tensor, action: str) -> torch.Tensor:
        """Sum a value over all ranks, on its device.

        Args:
            action: the operation that needs the sum, in words for the error.

        Raises:
            PlanError: another rank has moved on without taking part.
        """
        # A copy even on the host: the script's own value must not change.
        total = value.detach().to("cpu", copy=True)
        self._wait(dist.all_reduce(total, group=self._group, async_op=True), action)
        return total.to(value.device)

    def meet(self, action: str) -> None:
        """Wait for all ranks; PlanError if one has moved on without taking part."""
        self.summed(torch.zeros(1), action)

    def of_first(self, value: Any, action: str) -> Any:
        """Broadcast a picklable value from rank 0; PlanError if a rank has moved on without taking part."""
        self.meet(action)
        found = [value]
        if not self._fake:
            dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def _wait(self, work: Any, action: str) -> None:
        if self._fake:
            return
        began = looked = time.monotonic()
        gone_since: float | None = None
        while not work.is_completed():
            now = time.monotonic()
            time.sleep(0.0 if now - began < 1e-3 else 1e-4 if now - began < 0.1 else 1e-2)
            if now - began < LOOKS_AFTER_S or now - looked < LOOKS_AFTER_S / 4:
                continue
            looked = now
            ahead_rank = self._gone_on()
            if ahead_rank is None:
                gone_since = None
            elif gone_since is None:
                gone_since = now
            elif now - gone_since > SURE_AFTER_S:
                raise PlanError(
                    f"rank {ahead_rank[0]} {ahead_rank[1]} while rank {self.rank} waits for it in {action}"
                )
        try:
            work.wait()
        except RuntimeError as error:
            raise PlanError(
                f"another rank has left the job while rank {self.rank} waits in {action}"
            ) from error

    def _gone_on(self) -> tuple[int, str] | None:
        for rank in range(self.world):
            if rank == self.rank:
                continue
            if self._store.check([f"{self._name}/left/{rank}"]):
                return rank, "has left the job"
            key = f"{self._name}/calls/{rank}"
            if self._store.check([key]) and int(self._store.get(key)) > self._calls:
                return rank, "has gone on to the next call of the model"
        return None

    def left(self) -> None:
        """Record, for ranks that wait, that this rank has left the job."""
        # A job that has ended has no store any more.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._name}/left/{self.rank}", "1")


def leave() -> None:
    """Record in every job that this rank leaves it, for ranks that wait for this one."""
    for job in list(_alive):
        job.left()


def forget() -> None:
    """Drop the process groups of a job that ends, as two threads of each poll for work 100 times a second."""
    _of_mesh.clear()
    for job in list(_alive):
        job._group = None


_aten = torch.ops.aten
_SUMS = (
    _aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim, _aten.dot.default,
    _aten.linalg_vector_norm.default, _aten.prod.default, _aten.max.default, _aten.min.default,
)  # fmt: skip
"""Operators that may reduce a DTensor's shards to a scalar."""
_WHOLE = (
    _aten.mse_loss.default, _aten.mse_loss_backward.default, _aten.smooth_l1_loss.default,
    _aten.smooth_l1_loss_backward.default, _aten.huber_loss.default, _aten.huber_loss_backward.default,
)  # fmt: skip
"""Losses computed on whole tensors, as PyTorch would divide by a shard's count where shards are unequal."""
_of_mesh: dict[DeviceMesh, JobRanks] = {}


def read_whole(mesh: DeviceMesh, job: JobRanks) -> None:
    """Make ``item()``, sums, norms and losses of a mesh's DTensors equal on all its ranks from now on."""
    _of_mesh[mesh] = job
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    if _aten._local_scalar_dense.default in handlers:
        return
    handlers |= dict.fromkeys(_SUMS, _summed) | dict.fromkeys(_WHOLE, _on_whole)
    handlers[_aten._local_scalar_dense.default] = _number
    DTensor.__format__ = _formatted(DTensor.__format__)  # type: ignore[assignment, method-assign]


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (value,) = args
    job = _of_mesh.get(value.device_mesh)
    if job is None or all(placement.is_replicate() for placement in value.placements):
        return value._local_tensor.item()
    job.meet("reading a sum or norm of parameters or gradients; read it on every rank, and print it on one")
    with torch.no_grad():
        return _replicated(value)._local_tensor.item()


def _summed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _as_pytorch(op, args, kwargs)
    if not isinstance(result, DTensor) or result.dim() or not torch.is_grad_enabled():
        return result
    job = _of_mesh.get(result.device_mesh)
    if job is None or not any(placement.is_partial() for placement in result.placements):
        return result
    if not any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
        return result
    job.meet("a sum or norm of parameters or gradients; compute it on every rank, and print it on one")
    return _replicated(result)


def _on_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(value, DTensor) and value.device_mesh in _of_mesh for value in args):
        args = tuple(_replicated(value) if isinstance(value, DTensor) else value for value in args)
    return _as_pytorch(op, args, kwargs)


def _replicated(value: DTensor) -> DTensor:
    return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)


def _as_pytorch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    sharding = info.output_sharding = dispatcher.sharding_propagator.propagate_op_sharding(info.schema)
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(local, sharding.output_spec)


def _formatted(original: Callable[[DTensor, str], str]) -> Callable[[DTensor, str], str]:
    def formatted(value: DTensor, specification: str) -> str:
        if value.dim() or value.device_mesh not in _of_mesh:
            return original(value, specification)
        return format(value.detach().item(), specification)

    return formatted


_ELEMENTWISE = frozenset((
    "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "rsub", "pow", "square",
    "abs", "absolute", "neg", "negative", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p", "log2", "tanh",
    "sigmoid", "relu", "softplus", "sign", "sgn", "clamp", "clamp_min", "clamp_max", "erf", "sin", "cos",
    "reciprocal", "float", "double", "half", "bfloat16", "type_as", "clone", "detach", "contiguous",
    "flatten", "ravel", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__",
    "__rtruediv__", "__div__", "__rdiv__", "__pow__", "__rpow__", "__neg__", "__abs__",
))  # fmt: skip
_FLAT = frozenset({"view", "reshape"})
_OF_PARTS = frozenset((
    "cat", "concat", "concatenate", "stack", "dot", "l1_loss", "mse_loss", "_foreach_norm",
))  # fmt: skip
"""Functions that would silently cover only this rank's part of a parameter; they are refused."""
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WHAT = "a sum or norm of parameters; compute it on every rank, and print it on one"


class SpreadValue(torch.Tensor):
    """This rank's part of a parameter, or of a value computed from it element by element.

    Attributes:
        together: the ranks that have the parts.
        share: one divided by the number of ranks with the same part.
        key: the state-dict key of the parameter.
        whole: the shape of the whole parameter.
    """

    together: JobRanks
    share: float
    key: str
    whole: torch.Size

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _ELEMENTWISE or (name in _FLAT and args[1:] in ((-1,), ((-1,),))) or func == _DATA:
                return _elementwise(func, args, kwargs)
            if name in _OF_PARTS:
                raise _refused(func, args, kwargs)
            if name in _REDUCTIONS and (reduced := _REDUCTIONS[name](func, args, kwargs)) is not None:
                return reduced
            if name == "__deepcopy__":
                return copy.deepcopy(_plain(args[0]).detach(), *args[1:])
            try:
                result = func(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                if torch.is_grad_enabled() and any(
                    part.numel() < part.whole.numel() for part in _parts(args, kwargs)
                ):
                    raise _refused(func, args, kwargs) from error
                raise
        for value in result if isinstance(result, (tuple, list)) else (result,):
            # A tensor that is no result of arithmetic has none, or is the parameter itself.
            if isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, cls):
                raise _refused(func, args, kwargs)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _plain(self).__reduce_ex__(protocol)


# Else optimizers on GPUs would take one parameter at a time.
optimizers._foreach_supported_types.append(SpreadValue)


def spread_value(
    part: torch.Tensor, together: JobRanks, copies: int, key: str, whole: Sequence[int]
) -> SpreadValue:
    """Return ``part`` as a :class:`SpreadValue`, so that a script's sums and norms cover the whole parameter.

    Args:
        part: this rank's part of the parameter.
        together: the job's ranks, which have the other parts.
        copies: the number of ranks that have the same part as this rank.
        key, whole: the state-dict key and the whole shape of the parameter.
    """
    value = part.as_subclass(SpreadValue)
    value.together, value.share, value.key, value.whole = together, 1.0 / copies, key, torch.Size(whole)
    return value


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, SpreadValue) else value


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parts = _parts(args, kwargs)
    example = parts[0]
    if any(part.key != example.key for part in parts):
        raise _refused(func, args, kwargs)
    for value in args:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape != example.shape:
            raise PlanError(
                f"{example.key}, of which this rank has a part of shape {tuple(example.shape)} by the plan, "
                f"is combined with a tensor of shape {tuple(value.shape)}; compute this inside of the "
                "model's forward, or choose a sharded plan"
            )
    result = func(*args, **kwargs).as_subclass(SpreadValue)
    result.together, result.share = example.together, example.share
    result.key, result.whole = example.key, example.whole
    return result


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
    def forward(ctx: Any, part: torch.Tensor, value: SpreadValue) -> torch.Tensor:
        squares = (part.double().square() * value.share).sum()
        total = value.together.summed(squares, _WHAT).sqrt().to(part.dtype)
        ctx.save_for_backward(part, total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        part, total = ctx.saved_tensors
        # PyTorch's subgradient where all is zero.
        return gradient * torch.where(total == 0, 0.0, part / total), None


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if len(args) != 1 or kwargs:
        return None
    return _Sum.apply(_plain(args[0]), args[0])


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    total = _sum(func, args, kwargs)
    return None if total is None else total / args[0].whole.numel()


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
    others = (*args[2:], *(value for key, value in kwargs.items() if key not in ("p", "ord")))
    # Over some dims, or in another type.
    if any(value not in (None, False) for value in others):
        return None
    # For a matrix, 2 is a norm of another kind there.
    if order not in (None, "fro", 2) or (func is torch.linalg.norm and order == 2 and len(args[0].whole) > 1):
        raise _refused(func, args, kwargs)
    return _Norm.apply(_plain(args[0]), args[0])


_REDUCTIONS: dict[str, Callable[..., Any]] = {"sum": _sum, "mean": _mean}
_REDUCTIONS |= dict.fromkeys(("norm", "vector_norm", "linalg_norm", "linalg_vector_norm"), _norm)


def _parts(args: Any, kwargs: Any) -> list[SpreadValue]:
    flat = torch.utils._pytree.tree_leaves((args, kwargs))
    return [value for value in flat if isinstance(value, SpreadValue)]


def _refused(func: Any, args: Any, kwargs: Any) -> PlanError:
    # For an attribute (p.T) this is its getter.
    owner = getattr(func, "__self__", None)
    name = owner.__name__ if inspect.isgetsetdescriptor(owner) else getattr(func, "__name__", str(func))
    keys = dict.fromkeys(part.key for part in _parts(args, kwargs))
    return PlanError(
        f"the script computes {name} of {' and '.join([*keys][:2])}, of which ranks have parts under this "
        "plan: outside of the model, only elementwise operators on a parameter work, and sum(), mean() and "
        "the 2-norm of one parameter; compute the rest inside of the model's forward, or choose a sharded "
        "plan"
    )


_NORMS: tuple[Callable[..., Any], ...] = (
    torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm,
)  # fmt: skip
_KEEPS: tuple[Callable[..., Any], ...] = (torch.stack, torch.Tensor.to)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
    return 2.0 if order is None or order == "fro" else float(order)


def _norm_over_ranks(value: torch.Tensor, order: float) -> _SpreadNorm:
    norm = torch.linalg.vector_norm(value, order) if value.numel() else value.new_zeros(())
    copies = getattr(value, "copies", 1)
    # The powers of all ranks are summed, so each of several copies contributes its fraction.
    if copies > 1 and order != float("inf"):
        norm = norm / copies ** (1.0 / order)
    return norm.as_subclass(_SpreadNorm)


def spread(value: torch.Tensor, copies: int = 1) -> _SpreadGradient:
    """Return a rank's part of a gradient as scripts see it; ``copies`` ranks have the same part."""
    gradient = value.as_subclass(_SpreadGradient)
    gradient.copies = copies
    return gradient


class _SpreadGradient(torch.Tensor):
    """This rank's part of a gradient, which ``copies`` ranks have; empty on ranks without the parameter."""

    copies: int = 1

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Otherwise the call would come back to this very function, endlessly.
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NORMS:
                return _norm_over_ranks(args[0], _order(args, kwargs))
            # clip_grad_norm_ calls this where it can.
            if func is torch._foreach_norm:
                return [_norm_over_ranks(value, _order(args, kwargs)) for value in args[0]]
            return func(*args, **kwargs)


class _SpreadNorm(torch.Tensor):
    """Norms of this rank's gradients. The norm of these norms is taken over all ranks."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func in _NORMS:
                return _over_ranks(result, _order(args, kwargs))
        return result.as_subclass(cls) if func in _KEEPS else result


def _over_ranks(own: torch.Tensor, order: float) -> torch.Tensor:
    if not dist.is_initialized():
        return own
    if order == float("inf"):
        dist.all_reduce(own, op=dist.ReduceOp.MAX)
        return own
    # Powers of many elements are summed in float64: a narrow type overflows or loses the small ones.
    total = own.double() ** order
    dist.all_reduce(total)
    return (total ** (1.0 / order)).to(own.dtype)
