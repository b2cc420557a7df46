"""The conversion of an exported program into an operator graph: one pass over its nodes.

Calls that return a tensor unchanged are skipped. A tensor that depends on no input and no parameter is folded
into a constant, which is stored with size 1 along each dim where its values do not change.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Mapping
from typing import Any, Literal

import torch

from tensoropt.capture import folding, unsupported
from tensoropt.capture.attention_masks import MaskReader, attention_by_hand, with_flag
from tensoropt.capture.lines import node_line as _source
from tensoropt.capture.numbering import numbered
from tensoropt.errors import CaptureError
from tensoropt.graph import Operator, OperatorGraph, Ref, Tensor, TorchLiteral

Mode = Literal["train", "inference"]

_WITHOUT_GRADIENT = frozenset({
    "aten.detach.default", "aten.bernoulli.p", "aten.bernoulli.default", "aten.rand_like.default",
    "aten.randn_like.default",
})  # fmt: skip
_RESULTS_WITHOUT_GRADIENT = {"aten._native_batch_norm_legit_functional.default": (1, 2, 3, 4)}
"""Indices of an operator's results that have no gradient although the first result has one: the statistics of
a batch norm, which the norm reads if it is applied a second time."""
_OF_ONE_TYPE = frozenset({
    "aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default",
    "aten.baddbmm.default", "aten.matmul.default", "aten.convolution.default",
    "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default",
})  # fmt: skip
"""Calls whose operands must share one dtype, which tracing without values does not check."""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Converter:
    """One pass over an exported program's graph that builds the operator graph.

    Args:
        exported: the program.
        prefix: prefix of names in ``model`` that is removed to get the user's own names.
        mode: whether the graph is for training or inference.
        model: the exported module.
        stored: the model's tensors by name, if meta tensors replaced them for the export (``fidelity.py``).
        read_stored: whether the values of attention masks among the model's buffers may influence the graph.
    """

    def __init__(
        self,
        exported: Any,
        prefix: str,
        mode: Mode,
        model: torch.nn.Module,
        stored: Mapping[str, torch.Tensor],
        read_stored: bool,
    ):
        self.exported, self.stored, self.prefix, self.mode = exported, stored, prefix, mode
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.name_of: dict[torch.fx.Node, str] = {}
        self.parts_of: dict[torch.fx.Node, tuple[str, ...]] = {}
        self.folder = folding.Folder()
        folding.write_complex_as_real(exported.graph)
        self.masks = MaskReader(self.folder, read_stored)
        self.checks = folding.checks_of(exported.graph)
        self.notes: list[str] = []

    # -- placeholders -----------------------------------------------------------------------------

    def _placeholders(self) -> list[str]:
        signature = self.exported.graph_signature
        mutated = set(signature.buffers_to_mutate.values())
        inputs: list[str] = []
        nodes = [node for node in self.exported.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(nodes, signature.input_specs, strict=True):
            value, kind = node.meta["val"], spec.kind.name
            if kind == "USER_INPUT":
                if not isinstance(value, torch.Tensor):
                    # Numbers and flags take a position among the inputs, because the keys of the others count
                    # them, but become constants.
                    inputs.append("")
                    continue
                self._add(node, value, "input", key=str(len(inputs)))
                inputs.append(node.name)
            elif kind == "PARAMETER":
                # Read from the module, because export does not report which parameters are frozen.
                trains = self.mode == "train" and self.parameters[spec.target].requires_grad
                self._add(node, value, "parameter", key=self._key(spec.target), requires_grad=trains)
            elif kind == "BUFFER":
                self._add(node, value, "buffer", key=self._key(spec.target))
                # Weights in bytes would be folded into what they stand for, on every rank.
                if spec.target not in mutated and (value.dtype != torch.int8 or value.dim() != 2):
                    self.folder.give(node, self._stored(spec), stored=True)
            elif kind == "CONSTANT_TENSOR":
                # A tensor held by the model's code: no state dict contains it, so the graph keeps its value.
                self.folder.give(node, self._stored(spec), stored=True)
            else:
                raise CaptureError(
                    f"the model reads {spec.target or node.name}, an object that is no tensor "
                    f"({kind.lower()}); pass tensors, numbers and containers of them only, and draw random "
                    "numbers without generator="
                )
        return inputs

    def _stored(self, spec: Any) -> torch.Tensor:
        if spec.target in self.stored:
            value = self.stored[spec.target].detach()
            return value if value.is_meta else value.cpu()
        if spec.target in self.exported.constants:
            return self.exported.constants[spec.target]
        return self.exported.state_dict[spec.target]

    def _key(self, target: str) -> str:
        return target.removeprefix(self.prefix)

    def _aliases(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        captured = {t.key for t in tensors.values() if t.kind == "parameter"}
        # By identity: tied parameters are one object under several names, and export takes one of them as an
        # input.
        parameters = [(self._key(name), id(value)) for name, value in self.parameters.items()]
        main = {number: key for key, number in parameters if key in captured}
        return {key: main[number] for key, number in parameters if main.get(number, key) != key}

    def _add(
        self,
        node: torch.fx.Node,
        value: torch.Tensor,
        kind: Any,
        *,
        key: str | None = None,
        requires_grad: bool = False,
        name: str | None = None,
    ) -> str:
        name = name or node.name
        if unlike := unsupported.kind_of_tensor(value):
            raise unsupported.Unsupported(f"makes {unlike[0]}", unlike[1]).refused("the model", _source(node))
        # A symbolic size: a computed value determines the tensor's size.
        if not all(isinstance(size, int) for size in value.shape):
            raise unsupported.VALUE.refused("the model", _source(node))
        shape = tuple(value.shape)
        self.tensors[name] = Tensor(name, shape, _dtype_name(value.dtype), kind, requires_grad, key)
        self.name_of.setdefault(node, name)
        return name

    # -- calls ------------------------------------------------------------------------------------

    def convert(self) -> OperatorGraph:
        """Return the operator graph; raise :class:`CaptureError` if the program cannot be represented."""
        inputs = self._placeholders()
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self._called(node)
            elif node.op == "get_attr":
                reader = next(iter(node.users), node)
                name = getattr(reader.target, "__name__", "")
                raise unsupported.higher_order(name).refused("the model", _source(reader))
        outputs, mutations = self._outputs(self.exported.graph.output_node())
        if self.mode == "train" and self.tensors[outputs[0]].dtype.startswith("complex"):
            raise CaptureError(
                f"the loss is a complex number ({self.tensors[outputs[0]].dtype}), which has no gradient; "
                "return a real one, such as its .abs()"
            )
        operators, tensors = self._prune(outputs, mutations, inputs)
        aliases = self._aliases(tensors)
        self._note_unused(tensors, aliases)
        self.notes += self.masks.notes(operators)
        graph = OperatorGraph(
            tensors=tensors,
            operators=operators,
            inputs=tuple(name for name in inputs if name),
            outputs=outputs,
            mutations=mutations,
            constants={n: self.folder.values[n] for n, t in tensors.items() if t.kind == "constant"},
            aliases=aliases,
            training=self.mode == "train",
            notes=tuple(self.notes),
        )
        return numbered(graph)

    def _called(self, node: torch.fx.Node) -> None:
        try:
            self._call(node)
        except RuntimeError as error:
            # Constants are computed here, on tensors other than those with which PyTorch traced the model.
            kind = unsupported.of_error(error)
            if kind is not None:
                raise kind.refused("the model", _source(node)) from error
            reason = str(error).strip().partition("\n")[0].partition(". ")[0]
            raise CaptureError(
                f"PyTorch cannot compute {node.target}, which {_source(node) or node.name} calls on "
                f"constants: {reason}; make the result outside forward, as a buffer"
            ) from error

    def _call(self, node: torch.fx.Node) -> None:
        target = str(node.target)
        # Assertions on values are answered as for valid values, and nothing reads them.
        if node in self.checks:
            return
        if node.target is python_operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            if source in self.folder:
                self.folder.fold(node)
            else:
                assert isinstance(index, int)
                self.name_of[node] = self.parts_of[source][index]
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise unsupported.higher_order(target).refused("the model", _source(node))
        if folding.arguments_of(node).get("sparse") is True:
            raise unsupported.SPARSE_GRADIENT.refused("the model", _source(node))
        value = node.meta.get("val")
        constant = folding.filled(node, self.folder)
        if constant is not None:
            self.folder.give(node, constant, stored=self.folder.reads_stored(node))
            return
        # Before renames: a constant that is renamed is folded as well, and leaves no operator.
        if self.folder.can_fold(node):
            self.folder.fold(node)
            return
        source = self._renamed(node, target)
        if source is not None:
            self.name_of[node] = self._reference(source)
            return
        with_flag(node, self.masks)
        by_hand = attention_by_hand(node, self.masks)
        if by_hand is not None:
            for made in by_hand:
                self._call(made)
            self.name_of[node] = self.name_of[made]
            return
        self._emit(node, target, value)

    def _renamed(self, node: torch.fx.Node, target: str) -> torch.fx.Node | None:
        if target != "aten.detach.default":
            return folding.renamed(node)
        # A detach of a tensor with a gradient ends the gradient and is an operator; otherwise it only
        # renames.
        (source,) = node.all_input_nodes
        return None if self.tensors[self.name_of[source]].requires_grad else source

    def _emit(self, node: torch.fx.Node, target: str, value: Any) -> None:
        args, kwargs = self._arguments(node)
        if target == "aten.native_dropout.default":
            if len(node.users) == 1 and (node.args[1] == 0.0 or node.args[2] is False):
                self.parts_of[node] = (self.name_of[node.args[0]],)  # type: ignore[index]
                return
            # The mask is dropped: each rank generates its own from a counter (`generators.py`), and backward
            # needs no other.
            target, args, value = "aten.dropout.default", (args[0], args[1], True), value[:1]
        elif target == "aten.type_as.default":
            target, args = "aten._to_copy.default", args[:1]
            kwargs = {"dtype": TorchLiteral(_dtype_name(value.dtype))}
        elif target == "aten._native_batch_norm_legit_no_training.default":
            # It returns statistics on some devices only; nothing can read them.
            value = (value[0], *(torch.empty(0, dtype=v.dtype, device="meta") for v in value[1:]))
        elif target == "aten.cat.default":
            # An empty piece adds nothing, and need not even have as many dims as the others, although rules
            # expect it.
            args = (self._argument(folding.with_elements(node.args[0])), *args[1:])
        elif target == "aten.index.Tensor":
            shape = folding.viewed_shape(node, self.folder)
            if shape is not None:
                target, args = folding.VIEW, (args[0], list(shape))
        elif target in (folding.VIEW, folding.COPYING_VIEW):  # some devices write out "-1" only
            target, args = folding.VIEW, (args[0], list(value.shape))
        if target == "aten.broadcast_tensors.default":
            given = tuple(self._reference(n) for n in node.args[0])  # type: ignore[union-attr, arg-type]
            if all(self.tensors[n].shape == tuple(v.shape) for n, v in zip(given, value, strict=True)):
                self.parts_of[node] = given
                return
        reads = [self.tensors[self.name_of[n]] for n in node.all_input_nodes]
        if target in _OF_ONE_TYPE and len({t.dtype for t in reads}) > 1:
            types = " and ".join(dict.fromkeys(t.dtype for t in reads))
            raise CaptureError(
                f"the model multiplies {types} at {_source(node)}, which PyTorch does not support; give "
                "inputs and weights one type (`.to(x.dtype)`)"
            )
        # Export does not record gradients: an activation has one if anything it is computed from has one.
        differentiable = self.mode == "train" and target not in _WITHOUT_GRADIENT
        differentiable = differentiable and any(t.requires_grad for t in reads)
        single = isinstance(value, torch.Tensor)
        if not single and not isinstance(value, (tuple, list)):
            raise unsupported.VALUE.refused("the model", _source(node))
        names = []
        for index, part in enumerate([value] if single else value):
            if not isinstance(part, torch.Tensor):
                # Results that are None keep their position, because `getitem` counts them.
                names.append("")
                continue
            grad = differentiable and (part.is_floating_point() or part.is_complex())
            grad = grad and index not in _RESULTS_WITHOUT_GRADIENT.get(target, ())
            name = node.name if single else f"{node.name}.{index}"
            names.append(self._add(node, part, "activation", requires_grad=grad, name=name))
        if not single:
            self.parts_of[node] = tuple(names)
        outputs = tuple(name for name in names if name)
        where = _module(node, self.prefix), _source(node)
        self.operators.append(Operator(node.name, target, args, kwargs, outputs, *where))

    def _arguments(self, node: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self._argument(a) for a in node.args)
        kwargs = {
            k: self._argument(v)
            for k, v in node.kwargs.items()
            # The plan decides where a tensor is placed, so the graph must not name a device.
            if k not in ("device", "pin_memory", "layout") and v is not None
        }
        return args, kwargs

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return Ref(self._reference(value))
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return TorchLiteral(str(value).removeprefix("torch."))
        if isinstance(value, (torch.device, torch.layout)):
            return None
        return value

    def _reference(self, node: torch.fx.Node) -> str:
        if node in self.folder:
            name = self.name_of.get(node, node.name)
            existing = self.tensors.get(name)
            if existing is None or existing.kind != "buffer":
                value = node.meta["val"]
                # An equal constant may have been stored under another name, which is then used.
                kept = self.folder.keep(node, name, tuple(value.shape))
                if kept == name:
                    self._add(node, value, "constant", name=name)
                self.name_of[node] = name = kept
            return name
        return self.name_of[node]

    # -- outputs ----------------------------------------------------------------------------------

    def _outputs(self, node: torch.fx.Node) -> tuple[tuple[str, ...], dict[str, str]]:
        specs = self.exported.graph_signature.output_specs
        returned: list[Any] = []
        buffers: dict[str, torch.fx.Node] = {}
        by_key = {t.key: t.name for t in self.tensors.values() if t.kind == "buffer"}
        for argument, spec in zip(node.args[0], specs, strict=True):  # type: ignore[arg-type]
            if spec.kind.name == "BUFFER_MUTATION":
                buffers[by_key[self._key(spec.target)]] = argument
            elif spec.kind.name == "USER_INPUT_MUTATION":
                self.notes.append(
                    f"the model changes its input {spec.target} in place; a plan leaves the input unchanged"
                )
            else:
                # `state.py` has already refused changed parameters.
                assert spec.kind.name != "PARAMETER_MUTATION", spec.target
                returned.append(argument)
        names = tuple(self._reference(a) for a in returned if isinstance(a, torch.fx.Node))
        kept_results = set(names)
        return names, {buffer: self._new_value(value, kept_results) for buffer, value in buffers.items()}

    def _new_value(self, node: torch.fx.Node, kept_results: set[str]) -> str:
        """Return the name of the tensor with a buffer's new value. The value outlives the step, so a result
        that shares memory, or is already in ``kept_results``, is copied by an additional operator.

        Args:
            kept_results: names of the graph's results so far; the new value's name is added.
        """
        name = self._reference(node)
        if self.tensors[name].kind != "activation" or name in kept_results or self._is_view(name):
            value = node.meta["val"]
            copy = f"{node.name}_copy{len(kept_results)}"
            target, args = "aten.clone.default", (Ref(name),)
            self.tensors[copy] = Tensor(copy, tuple(value.shape), _dtype_name(value.dtype), "activation")
            where = _module(node, self.prefix), _source(node)
            self.operators.append(Operator(copy, target, args, {}, (copy,), *where))
            name = copy
        kept_results.add(name)
        return name

    def _is_view(self, name: str) -> bool:
        maker = next(node for node, made in self.name_of.items() if made == name)
        source = maker.args[0] if maker.target is python_operator.getitem else maker
        assert isinstance(source, torch.fx.Node)
        made = maker.meta["val"]
        made = made if isinstance(made, torch.Tensor) else made[int(name.rpartition(".")[2])]
        memory = made.untyped_storage()._cdata
        return any(
            value.untyped_storage()._cdata == memory
            for value in (read.meta.get("val") for read in source.all_input_nodes)
            if isinstance(value, torch.Tensor)
        )

    def _prune(
        self, outputs: tuple[str, ...], mutations: Mapping[str, str], inputs: list[str]
    ) -> tuple[tuple[Operator, ...], dict[str, Tensor]]:
        # Backwards from the graph's outputs: in training that is the loss alone, so logits are dropped.
        needed = set(outputs) | set(mutations.values()) | set(mutations)
        kept: list[Operator] = []
        for op in reversed(self.operators):
            if needed.intersection(op.outputs):
                kept.append(op)
                needed.update(op.inputs())
        kept.reverse()
        made = {name for op in kept for name in op.outputs}
        needed |= made | set(inputs)
        return tuple(kept), {name: t for name, t in self.tensors.items() if name in needed}

    def _note_unused(self, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        used = {t.key for t in tensors.values()} | set(aliases)
        unused = [str(t.key) for t in self.tensors.values() if t.kind == "parameter" and t.key not in used]
        if unused:
            self.notes.append(f"{len(unused)} parameters are not used by the loss: {', '.join(unused[:5])}")


def _module(node: torch.fx.Node, prefix: str) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    # The innermost module in which the call was made.
    path = list(stack.values())[-1][0]
    name = str(path).removeprefix("L['self'].").removeprefix("L['self']")
    return "" if f"{name}." == prefix else name.removeprefix(prefix)
