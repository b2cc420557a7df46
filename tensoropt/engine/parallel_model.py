"""A user's model and the engine that runs it: calls, parameters and state dicts, for plans of any kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tensoropt.capture import Capture
from tensoropt.engine.calls import CallingConvention
from tensoropt.graph import OperatorGraph

ATTRIBUTE = "_tensoropt"


class ParallelModel:
    """What ties a model to its engine; found at ``model._tensoropt``.

    Attributes:
        engine: runs the plan.
        mesh: of the job's ranks; None for one process.
        names, shapes: state-dict key -> the graph's name; the model's own shape.
        parameters: graph name -> what stands in the model for it.
    """

    engine: Any

    def __init__(self, model: nn.Module, captured: Capture, source: OperatorGraph, mesh: DeviceMesh | None):
        self.model = model
        self.captured = captured
        self.source = source
        self.mesh = mesh
        self.convention = CallingConvention(model.forward, captured)
        self.names: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parameters: dict[str, nn.Parameter] = {}

    def install(self) -> None:
        self._replace_parameters()
        self.engine.shards.book.show_as(self.parameters, self.shown_gradient)
        self._replace_buffers()
        self.model.forward = self.forward
        self.model.register_state_dict_post_hook(lambda *given: self._to_own_shapes(*given))
        self.model.register_load_state_dict_pre_hook(lambda *given: self._to_stored(*given))
        object.__setattr__(self.model, ATTRIBUTE, self)

    # -- what the kinds of plans differ in --------------------------------------------------------

    def shown(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """What is here of a parameter, as a user sees it."""
        raise NotImplementedError

    def shown_gradient(self, name: str, local: torch.Tensor) -> torch.Tensor:
        return self.shown(name, local)

    def local(self, name: str) -> torch.Tensor:
        """What is here of a parameter."""
        leaf: torch.Tensor = self.engine.shards.leaves[name]
        return leaf.detach()

    def own_shape(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """A value that lies like the parameter ``key``, in the model's own shape."""
        raise NotImplementedError

    def stored(self, key: str, value: torch.Tensor) -> torch.Tensor:
        """A whole value, or any DTensor of it, laid out like the parameter ``key``."""
        raise NotImplementedError

    def lies_right(self, key: str, value: torch.Tensor) -> bool:
        """Whether a value in a state dict is laid out like the parameter ``key`` already."""
        raise NotImplementedError

    def is_state_of(self, parameter: nn.Parameter, field: str, value: Any) -> bool:
        """Whether a field of an optimizer's state lies like its parameter."""
        return isinstance(value, torch.Tensor) and value.shape == parameter.shape

    # -- parameters and buffers -------------------------------------------------------------------

    def _replace_parameters(self) -> None:
        for tensor in self.source.parameters:
            key = str(tensor.key)
            shown = self.shown(tensor.name, self.local(tensor.name))
            self.parameters[tensor.name] = nn.Parameter(shown, tensor.requires_grad)
            keys = [key, *(alias for alias, main in self.source.aliases.items() if main == key)]
            for each in keys:
                owner, attribute = _owner(self.model, each)
                owner._parameters[attribute] = self.parameters[tensor.name]
                self.names[each], self.shapes[each] = tensor.name, tensor.shape

    def _replace_buffers(self) -> None:
        """Buffers of the model and of the engine are the same tensors."""
        for name, value in self.engine.buffers.items():
            owner, attribute = _owner(self.model, str(self.source.tensors[name].key))
            if attribute in owner._buffers:
                owner._buffers[attribute] = value

    # -- calls ------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self.convention.inputs(args, kwargs)
        outputs = self.engine(*inputs, evaluating=not self.model.training)
        if self.source.mutations:
            self._replace_buffers()
        if self.captured.returned is not None:
            return self.captured.returned.rebuild(outputs[0])
        return torch.utils._pytree.tree_unflatten(list(outputs), self.captured.out_spec)

    # -- state dicts ------------------------------------------------------------------------------

    def parameter_keys(self) -> dict[str, nn.Parameter]:
        """State-dict keys of the trained parameters, without aliases."""
        return {str(tensor.key): self.parameters[tensor.name] for tensor in self.source.parameters}

    def _to_own_shapes(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
    ) -> None:
        for key in self.names:
            if prefix + key in state:
                state[prefix + key] = self.own_shape(key, state[prefix + key])

    def _to_stored(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in self.names:
            value = state.get(prefix + key)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.shapes[key]:
                continue
            if not self.lies_right(key, value):
                state[prefix + key] = self.stored(key, value)


def _owner(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, attribute = key.rpartition(".")
    return model.get_submodule(path), attribute
