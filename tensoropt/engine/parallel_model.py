"""The connection of a user's model with its engine: calls, parameters and state dicts."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensoropt.capture import Capture
from tensoropt.engine.calls import CallingConvention
from tensoropt.engine.engine import Engine
from tensoropt.engine.evaluation import CallEvaluator
from tensoropt.engine.guard import Guard, keep_in_place
from tensoropt.engine.other_batches import ignored_targets
from tensoropt.engine.requested_gradients import SHAPE, refuse_requests
from tensoropt.engine.runtime import SameCalls, is_first, mode_of
from tensoropt.engine.script_values import JobRanks, SpreadValue, read_whole, spread, spread_value
from tensoropt.errors import PlanError
from tensoropt.sharding.groups import batch_inputs

_Read = TypeVar("_Read")
_LISTED = 3
"""The largest number of names in a warning."""


def is_state_of(parameter: torch.Tensor, field: str, value: Any) -> bool:
    """Return whether an optimizer's state field has the parameter's shape and layout, unlike a step count."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and field != "step"


class _StaleParameters:
    """The parameters from before parallelization, to warn if the script still refers to one."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self._of = {key: weakref.ref(parameter) for key, parameter in parameters.items()}

    def warn(self) -> None:
        keys, self._of = self._of, {}
        if not any(ref() is not None for ref in keys.values()):
            return
        gc.collect()  # what only a cycle still refers to is not used
        names = [key for key, ref in keys.items() if ref() is not None]
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            warnings.warn(
                f"something still refers to the parameters that the model had before parallelize "
                f"({', '.join(names[:_LISTED])}{more}): a list of parameters, a copy for averaging, a loss. "
                "They are not trained; take the model's parameters again (optimizers have them already)",
                stacklevel=4,
            )


ATTRIBUTE = "_tensoropt"


class ParallelModel:
    """The connection between a user's model and its engine, stored as ``model._tensoropt``.

    :meth:`install` replaces the model's parameters, buffers and forward. If all ranks run the same program,
    parameters become DTensors. Otherwise a rank's own parameters are plain tensors, and all others are empty.

    Attributes:
        names: state-dict key -> graph name.
        shapes, dtypes: state-dict key -> shape and dtype in the model.
        parameters: graph name -> the model's parameter.
        evaluator: the runner of calls in eval mode without gradients; None for inference plans.
        outputs: the results of those calls: ``all`` or ``loss``.
        attributes, hooks: the model's earlier attributes, and the hooks added to it.
    """

    def __init__(self, model: nn.Module, captured: Capture, engine: Engine):
        self.model = model
        self.captured = captured
        self.engine = engine
        self.source = engine.source
        self.device = engine.runtime.device
        mesh = engine.runtime.device_mesh
        ignored = functools.cache(lambda: ignored_targets(engine.strategy.graph))
        self.convention = CallingConvention(model.forward, captured, engine.share, ignored)
        if captured.returned is not None:  # refused here, and not by the first call
            captured.returned.rebuild(torch.zeros(()))
        self.guard = Guard(model)
        self.together = JobRanks() if engine.runtime.distributed else None
        if mesh is not None and self.together is not None:
            read_whole(mesh, self.together)
        self.names: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.evaluator: CallEvaluator | None = None
        self.outputs: Literal["all", "loss"] = "all"
        self._compiled = self._warned = False

    def install(
        self, *, compare_ranks: bool = True, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> None:
        """Replace the model's forward, parameters and buffers by the engine's, in place.

        Args:
            compare_ranks: whether to compare the ranks' inputs in the first calls and regularly later.
            loss: a function from the model's output to its loss.
        """
        compare = compare_ranks and self.engine.runtime.distributed
        names = self.convention.input_names()
        share = self.engine.share
        shares = [share.index if name in share.divided else -1 for name in self.source.inputs]
        self._same = SameCalls(names, self.engine.reads(), self.device, shares) if compare else None
        # Checks are not part of what a compiler compiles; they break its graph before the model's.
        self._inputs_of_call = torch.compiler.disable(self._checked_inputs)
        if self.source.training:
            self.evaluator = CallEvaluator(self, loss, compare_ranks=compare_ranks)
        self._evaluated = torch.compiler.disable(self._evaluate)
        refuse_requests()
        # Before gradients are shown, which need the new parameters as owners.
        self._replace_parameters()
        self.engine.shards.show_gradients(self.parameters, self.shown_gradient)
        if any(tensor.name not in self.engine.shards.leaves for tensor in self.source.parameters):
            self.engine.after_backward = self._show_absent_gradients
        self._replace_buffers()
        self.attributes = dict(self.model.__dict__)
        # On the instance, so that hooks of the module and torch.compile(model) still go around it.
        self.model.forward = self._shown_forward()
        self.hooks = [
            self.model.register_state_dict_pre_hook(lambda *_: self._meet_for_state()),
            self.model.register_state_dict_pre_hook(lambda *_: self.engine.sync_buffers()),
            self.model.register_state_dict_post_hook(lambda *arguments: self._to_own_shapes(*arguments)),
            # PyTorch's public hooks cannot replace the dict.
            self.model._register_state_dict_hook(
                lambda _, state, prefix, __: self._with_warning(state, prefix)
            ),
            self.model.register_load_state_dict_pre_hook(lambda *arguments: self._to_stored(*arguments)),
        ]
        # Bypasses nn.Module's own __setattr__, which is for parameters, modules and buffers.
        object.__setattr__(self.model, ATTRIBUTE, self)
        # As loaders and samplers of data-parallel jobs ask: of which part of the batch is this rank's.
        self.model.__dict__["data_rank"] = share.index
        self.model.__dict__["data_world"] = share.world
        # As scripts with DDP accumulate; gradients are reduced in each backward all the same.
        self.model.__dict__["no_sync"] = contextlib.nullcontext
        self._watch()
        if (words := self.engine.shown_otherwise()) and is_first():
            warnings.warn(words, stacklevel=4)

    @property
    def global_rows(self) -> int:
        """The number of rows in a global batch; 0 if no input has a batch dim."""
        batch = batch_inputs(self.source)
        return self.source.tensors[batch[0]].shape[0] if batch else 0

    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shape of each input, by the name of the user's argument."""
        shapes = [tuple(self.source.tensors[name].shape) for name in self.source.inputs]
        return dict(zip(self.convention.input_names(), shapes, strict=True))

    # -- this rank's parts ------------------------------------------------------------------------

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter in the type that scripts see, such as a DTensor."""
        value = self.engine.shards.distributed(name, local)
        # One process: plain tensors, so that scripts without a job need nothing of `torch.distributed`.
        if self.together is None or isinstance(value, DTensor):
            return value
        tensor, copies = self.source.tensors[name], self.engine.shards.copies(name)
        return spread_value(local, self.together, copies, str(tensor.key), tensor.shape)

    def shown_gradient(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a gradient in the type that scripts see, such as a DTensor."""
        value = self.engine.shards.distributed(name, local)
        if self.together is None or isinstance(value, DTensor):
            return value
        return spread(local, self.engine.shards.copies(name))

    def local(self, name: str) -> torch.Tensor:
        leaves = self.engine.shards.leaves
        return leaves[name].detach() if name in leaves else self._absent(name)

    def _absent(self, name: str) -> torch.Tensor:
        tensor = self.source.tensors[name]
        shape = (0, *tensor.shape[1:])
        return torch.empty(shape, dtype=getattr(torch, tensor.stored_dtype), device=self.device)

    def _show_absent_gradients(self) -> None:
        """Give parameters of other ranks an empty gradient, so that optimizers do not skip them."""
        for tensor in self.source.parameters:
            if tensor.requires_grad and tensor.name not in self.engine.shards.leaves:
                parameter = self.parameters[tensor.name]
                # Optimizers skip parameters without a gradient, so their states would differ between ranks.
                parameter.grad = spread(torch.empty_like(parameter))

    def own_shape(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the layout of the parameter ``key``, reshaped to the model's shape."""
        return self.engine.shards.in_own_shape(self.names[key], value)

    def stored(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor or any DTensor in the layout of the parameter ``key``."""
        name = self.names[key]
        # All ranks take part in it, those that drop the result too.
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        whole = whole.detach().reshape(self.shapes[key])
        if name not in self.engine.shards.leaves:
            return self._absent(name).to(whole.dtype)
        return self.engine.shards.distributed(name, self.engine.shards.shard(name, whole))

    def _is_stored(self, key: str, value: torch.Tensor) -> bool:
        parameter = self.parameters[self.names[key]]
        return (
            isinstance(value, DTensor)
            and isinstance(parameter, DTensor)
            and value.shape == parameter.shape
            and value.placements == parameter.placements
            and value.device_mesh == parameter.device_mesh
        )

    def in_state(self, key: str) -> bool:
        """Return whether this rank's state dict has a parameter."""
        return self.engine.shards.in_state(self.names[key])

    # -- parameters and buffers -------------------------------------------------------------------

    def _replace_parameters(self) -> None:
        old: dict[str, nn.Parameter] = {}
        for tensor in self.source.parameters:
            key = str(tensor.key)
            owner, attribute = _owner(self.model, key)
            if (parameter := owner._parameters[attribute]) is not None:
                old[key], self.dtypes[key] = parameter, parameter.dtype
            shown = self.shown(tensor.name, self.local(tensor.name))
            new = self.parameters[tensor.name] = _as_parameter(shown, tensor.requires_grad)
            object.__setattr__(new, SHAPE, torch.Size(tensor.shape))
            # Tied parameters have one `nn.Parameter` under all their names, or an optimizer would step it
            # twice.
            keys = [key, *(alias for alias, main in self.source.aliases.items() if main == key)]
            for each in keys:
                owner, attribute = _owner(self.model, each)
                owner._parameters[attribute] = self.parameters[tensor.name]
                self.names[each], self.shapes[each] = tensor.name, tensor.shape
        self._retarget_optimizers({id(parameter): key for key, parameter in old.items()})
        self._stale = _StaleParameters(old)

    def _retarget_optimizers(self, key_of: Mapping[int, str]) -> None:
        """Replace the old parameters by the new ones in every optimizer of this process.

        Optimizers do not record their model, and ``swap_tensors`` refuses DTensors, so they are found among
        the live objects of the process.

        Args:
            key_of: ``id`` of an old parameter -> its state-dict key.
        """
        new = {old: self.parameters[self.names[key]] for old, key in key_of.items()}
        # By type, as `isinstance` would call proxies, which may do anything.
        for optimizer in [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]:
            for group in optimizer.param_groups:
                group["params"] = [new.get(id(p), p) for p in group["params"]]
            for old in [p for p in optimizer.state if id(p) in new]:
                optimizer.state[new[id(old)]] = {
                    field: self.stored(key_of[id(old)], value) if is_state_of(old, field, value) else value
                    for field, value in optimizer.state.pop(old).items()
                }

    def _watch(self) -> None:
        keys = self.parameter_keys()
        self.guard.watch_parameters(keys)
        owned = set(self.names)
        for name in self.engine.buffers:
            key = str(self.source.tensors[name].key)
            owner, attribute = _owner(self.model, key)
            if attribute in owner._buffers:
                self.guard.watch_buffer(key, owner._buffers, attribute, self.engine.buffers, name)
                owned.add(key)
        keep_in_place(self.model, frozenset(owned))
        # Looked up on the object by `copy.deepcopy` and `pickle`.
        self.model.__dict__["__deepcopy__"] = self.model.__dict__["__reduce_ex__"] = _refuse_copy

    def _replace_buffers(self) -> None:
        for name, value in self.engine.buffers.items():
            owner, attribute = _owner(self.model, str(self.source.tensors[name].key))
            if attribute in owner._buffers:
                owner._buffers[attribute] = value

    def plain_copy(self, values: Mapping[str, torch.Tensor]) -> nn.Module:
        """Copy the model from before parallelization, with parameters ``values`` (by state-dict key)."""
        memo: dict[int, Any] = {}
        for key, value in values.items():
            name = self.names[key]
            trained = self.source.tensors[name].requires_grad
            memo[id(self.parameters[name])] = nn.Parameter(value, trained)
        copied = memo[id(self.model)] = object.__new__(type(self.model))
        before = self.attributes.keys() & self.model.__dict__.keys() - {"_apply"}
        attributes = {name: self.model.__dict__[name] for name in before}
        attributes |= {"forward": self.attributes["forward"]} if "forward" in self.attributes else {}
        for module in self.model.modules():
            # It has the old module bound.
            memo[id(module.__dict__.get("_apply"))] = None
        copied.__dict__.update(copy.deepcopy(attributes, memo))
        for module in copied.modules():
            module.__dict__.pop("_apply", None)
        kinds = copied._state_dict_hooks, copied._state_dict_pre_hooks, copied._load_state_dict_pre_hooks
        for handle in self.hooks:
            for hooks in kinds:
                hooks.pop(handle.id, None)
        return copied

    # -- calls ------------------------------------------------------------------------------------

    def _shown_forward(self) -> Callable[..., Any]:
        run = self._uncompiled_forward() if self.engine.uncompiled else self.forward

        @functools.wraps(self.model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        return forward

    def _uncompiled_forward(self) -> Callable[..., Any]:
        """Return :meth:`forward` excluded from compilation; it warns once if the script compiles it."""
        rest = "which a compiler would undo; the model runs as it is, so leave torch.compile out"
        words = f"{self.engine.uncompiled}, {rest}"

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._compiled and not self._warned:
                self._warned = True
                warnings.warn(f"torch.compile changes nothing here: {words}", stacklevel=2)
            return self.forward(*args, **kwargs)

        outside = torch.compiler.disable(run, reason=words)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Checked outside of the part that the compiler leaves alone, in which it is always False.
            self._compiled = torch.compiler.is_compiling()
            return outside(*args, **kwargs)

        return forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output; in training only its loss, with None in place of other results."""
        if not (self.model.training or torch.is_grad_enabled()):
            output = self._evaluated(args, kwargs)
            if output is not None:
                return output
        inputs = self._inputs_of_call(args, kwargs)
        # A script whose model began on the meta device need not know where it went. Only then: a call of `to`
        # would be a compiled graph of its own, which does nothing.
        if any(value.device != self.device for value in inputs):
            inputs = [value.to(self.device) for value in inputs]
        outputs = self.engine(*inputs, evaluating=not self.model.training)
        # The engine replaces buffers instead of writing to them; the model has to show the new ones.
        if self.source.mutations:
            self._replace_buffers()
        if self.captured.returned is not None:
            return self.captured.returned.rebuild(outputs[0])
        return torch.utils._pytree.tree_unflatten(list(outputs), self.captured.out_spec)

    @property
    def returns_more(self) -> bool:
        """Whether the model returns more than its loss."""
        return self.captured.returned is not None and self.captured.returned.container is not None

    def _evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a call in eval mode; None if the plan's own graph has to compute it."""
        if self.evaluator is None:
            return None
        evaluator, mode = self.evaluator, mode_of(training=False, gradients=False)
        call = self._begun(mode, lambda: evaluator.read(args, kwargs), lambda _: [])
        return evaluator(call, everything=self.returns_more and self.outputs == "all")

    def _checked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        mode = mode_of(self.model.training, torch.is_grad_enabled())
        return self._begun(mode, lambda: self.convention.inputs(args, kwargs), lambda inputs: inputs)

    def _begun(
        self, mode: int, read: Callable[[], _Read], compared: Callable[[_Read], Sequence[torch.Tensor]]
    ) -> _Read:
        """Read a call's arguments, and compare the call with those of the other ranks.

        Args:
            mode: the call's mode (:func:`mode_of`).
            read: a function that reads the arguments, or raises an error.
            compared: a function that returns the inputs that must be equal on all ranks.
        """
        self._stale.warn()
        if self.together is not None:
            self.together.went_on()
        same = self._same if self._same is not None and self._same.due() else None
        try:
            self.guard.check()
            call = read()
        except Exception:
            # The others are told before it is raised: they would wait for this rank in the call that it
            # refuses.
            if same is not None:
                same.compare(None, mode)
            raise
        if same is not None:
            same.compare(compared(call), mode)
        return call

    # -- state dicts ------------------------------------------------------------------------------

    def parameter_keys(self) -> dict[str, nn.Parameter]:
        return {str(tensor.key): self.parameters[tensor.name] for tensor in self.source.parameters}

    def _meet_for_state(self) -> None:
        if self.together is not None and self.engine.shards.gathers_state:
            self.together.meet(
                "model.state_dict(), which under this plan sends parts from rank to rank; call it on every "
                "rank, and write its result on one (or use tensoropt.save_checkpoint on every rank)"
            )

    def _to_own_shapes(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        for key in self.names:
            if not self.in_state(key):
                state.pop(prefix + key, None)
            elif prefix + key in state:
                state[prefix + key] = self.own_shape(key, state[prefix + key])

    def _with_warning(self, state: dict[str, Any], prefix: str) -> dict[str, Any] | None:
        """Return ``state`` as a dict that warns when it is saved, if it lacks parts that are on other ranks.

        Return None, with which PyTorch keeps ``state`` itself, if nothing is missing, or if the model is part
        of another module (``prefix`` is not empty), to which the dict belongs.
        """
        own = [key for key in self.names if prefix + key in state]
        values = [state[prefix + key] for key in own]
        split = sum(
            isinstance(v, DTensor) and not all(p.is_replicate() for p in v.placements) for v in values
        )
        missing = len(self.names) - len(own)
        # A model around this one has the dict, and goes on with it.
        if self.together is None or prefix or not (split or missing):
            return None
        partial = _PartOfState(state)
        partial.__dict__ |= state.__dict__
        partial.lacks = (
            f"{missing} of {len(self.names)} parameters" if missing else f"parts of {split} parameters"
        )
        return partial

    def _to_stored(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key, name in self.names.items():
            if not self.in_state(key):
                state[prefix + key] = self.local(name)  # other ranks load this parameter
                continue
            value = state.get(prefix + key)
            # Left alone, so that `load_state_dict` itself refuses it in its own words.
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.shapes[key]:
                continue
            if not self._is_stored(key, value):
                state[prefix + key] = self.stored(key, value)


class _PartOfState(OrderedDict[str, Any]):
    """A state dict without the parts of other ranks; pickling it warns with the text ``lacks``."""

    lacks: str

    def __reduce_ex__(self, protocol: Any) -> Any:
        warnings.warn(
            f"the written model.state_dict() lacks {self.lacks}, which are on other ranks: use "
            "tensoropt.save_checkpoint on every rank, or write what get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) gives on every rank",
            stacklevel=2,
        )
        plain = OrderedDict(self)
        plain.__dict__ |= {name: value for name, value in self.__dict__.items() if name != "lacks"}
        return plain.__reduce_ex__(protocol)


def _as_parameter(value: torch.Tensor, trained: bool) -> nn.Parameter:
    if not isinstance(value, SpreadValue):
        return nn.Parameter(value, trained)
    value.requires_grad_(trained)
    value._is_param = True  # how PyTorch marks parameters of a class of their own
    return value  # type: ignore[return-value]


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, attribute = key.rpartition(".")
    return model.get_submodule(path), attribute


def original_shape(parameter: torch.Tensor) -> torch.Size:
    """Return a parameter's shape in the unsplit model, or any other tensor's own shape."""
    return getattr(parameter, SHAPE, parameter.shape)


def _refuse_copy(*_: Any) -> Any:
    raise PlanError(
        "a parallelized model cannot be copied or pickled: it belongs to its ranks. For an average of "
        "weights keep copies of its parameters ([p.detach().clone() for p in model.parameters()]) and lerp_ "
        "them; to save it use save_checkpoint, or torch.distributed.checkpoint with model.state_dict(); "
        "tensoropt.whole(model) gives a plain module with whole weights"
    )


def parallel_of(model: nn.Module) -> ParallelModel:
    """Return the :class:`ParallelModel` of a parallelized model; PlanError for any other model."""
    parallel = getattr(model, ATTRIBUTE, None)
    if parallel is None and hasattr(getattr(model, "module", None), ATTRIBUTE):
        raise PlanError(
            f"{type(model).__name__} wraps the parallelized model, whose plan adds up gradients itself; "
            "pass the bare module, and leave the wrapper out"
        )
    if not isinstance(parallel, ParallelModel):
        raise PlanError("this model is not parallelized; call tensoropt.parallelize(model, plan) first")
    return parallel
